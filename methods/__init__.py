"""Federated-learning methods: functions that return a `Method`.

To add a method, write a file and add the method's name to a group of `_ENTRIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from raysim.core.method import Method

#: Title of a group -> its methods: `name`, or `file.name` if the file has another name.
_ENTRIES = {
    "The four papers": "fedvg flfa livar univarfl",
    "Weights and server steps": "uniform.fedavg uniform fedvg_loss fedvg_cosine fednova fedavgm fedopt.fedadam fedopt.fedyogi "
    "fedopt.fedadagrad fedacg elastic",
    "Asynchronous rounds": "asynchronous.fedbuff asynchronous.fedasync",
    "Local training": "fedprox scaffold feddyn moon fedsol fedalign client_momentum",
    "Label skew": "fedrs fedlc fedproto ccvr freeze",
    "Other backward passes": "feedback.fa feedback.dfa",
    "Merging": "fisher regmean",
    "Robust means": "robust_means.coordinate_median robust_means.trimmed_mean robust_means.geometric_median "
    "robust_means.centered_clipping robust_means.krum robust_means.bulyan",
    "Robust filters": "robust_filters.norm_bounding robust_filters.clustering robust_filters.clipped_clustering "
    "robust_filters.sign_guard robust_filters.dnc robust_filters.fltrust",
    "Mixing before a rule": "mixing.nnm mixing.bucketing",
    "Attacks": "attack_data.label_flip attack_data.backdoor attack.sign_flip attack.gaussian attack.additive_noise "
    "attack_omniscient.alie attack_omniscient.ipm attack_omniscient.min_max attack_omniscient.min_sum attack_omniscient.fang",
    "Adapters": "flora ffa_lora",
    "Personal models": "personal fine_tune ditto pfedme apfl per_fedavg fedrep fedrep.fedbabu fedala",
    "Privacy": "dp local_dp dp_sgd",
    "Compression": "compression.top_k compression.random_k compression.qsgd compression.sign compression.sign_majority "
    "compression.power_sgd quantised_broadcast",
    "Measures": "diagnostics keep_factors",
}

#: Title of a group -> names of its methods.
GROUPS = {title: [entry.rpartition(".")[2] for entry in text.split()] for title, text in _ENTRIES.items()}


class _Methods(Mapping[str, "Callable[..., Method]"]):
    """Functions by name, imported on first use: PyTorch takes seconds to load, and a wrong name is refused at once."""

    _files: ClassVar = {
        entry.rpartition(".")[2]: entry.partition(".")[0] for text in _ENTRIES.values() for entry in text.split()
    }

    def __getitem__(self, name: str) -> Callable[..., Method]:
        make: Callable[..., Method] = getattr(import_module(f"methods.{self._files[name]}"), name)
        return make

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


#: Name in a configuration -> the method's function.
METHODS = _Methods()
