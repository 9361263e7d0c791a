"""Inputs shared by all trials of a sweep, prepared once before the start: shards and pretrained weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import ray

from raysim.base.progress import Lines, Tell
from raysim.config import Config, data_cache
from raysim.data.federation import build_all_shards
from raysim.engine.ray.session import Ref, plain_errors, this_node
from raysim.engine.ray.shards import write_shards
from raysim.plan.build import Made, Ready, model_spec
from raysim.plan.check import check_partition
from raysim.plan.held_weights import held_weights

#: Number of partitions built together: each row is read once for all, and all their manifests are in memory.
AT_A_TIME = 32

#: Key of data and weights -> Ray's reference to a `Ready`, which lies on the driver's node.
AllReady = Mapping[str, Ref]


def make_ready(configs: Sequence[Config], say: Tell) -> AllReady:
    """Build the shards of all partitions of these trials and fetch their weights, on the running Ray.

    Args:
      configs: completed by `check`; say: prints a line.
    Raises:
      DataError, ModelError: shards or weights cannot be made; nothing has been started.
    """
    different = {_key(config): config for config in configs}
    made: dict[str, Ref] = {}
    with plain_errors():
        waiting = iter(different.items())
        while some := list(islice(waiting, AT_A_TIME)):
            made |= {key: ray.put(ready) for key, ready in _made(dict(some), say)}
    return made


def ready_for(config: Config, made: AllReady) -> Ready | None:
    """Return a trial's prepared inputs; None for a trial proposed later, which prepares its own inputs."""
    ref = made.get(_key(config))
    if ref is None:
        return None
    ready = ray.get(ref)
    assert isinstance(ready, Ready)
    return ready


def _key(config: Config) -> str:
    """Return the parts of a configuration that determine data and weights; extra parts are harmless."""
    parts = [config.data, config.partition, config.is_joint, config.seed if config.partition.seed is None else None]
    weights = [config.model] if config.model.pretrained is not None else []
    dumped = [part.model_dump(mode="json") if hasattr(part, "model_dump") else part for part in (*parts, *weights)]
    return hashlib.sha256(json.dumps(dumped, sort_keys=True).encode()).hexdigest()


def _made(configs: Mapping[str, Config], say: Tell) -> Iterator[tuple[str, Ready]]:
    partitions = {key: check_partition(config.model_dump(mode="json"), "the sweep") for key, config in configs.items()}
    manifests = {manifest.checksum: manifest for _, manifest in partitions.values()}
    folders: dict[tuple[Path, str], Path] = {}
    for cache in {data_cache(config) for config in configs.values()}:
        here = [key for key, config in configs.items() if data_cache(config) == cache]
        wanted = list({partitions[key][1].checksum for key in here})
        lines = Lines(f"writing the shards of {len(wanted)} partitions", say)
        built = build_all_shards([manifests[one] for one in wanted], cache / "shards", write_shards, lines.progress)
        folders |= {(cache, one): folder for one, folder in zip(wanted, built, strict=True)}
    for key, config in configs.items():
        info, manifest = partitions[key]
        cache = data_cache(config)
        weights = held_weights(model_spec(config, info), cache / "weights")
        made = Made(str(folders[cache, manifest.checksum]), this_node(), weights)
        yield key, Ready(info, manifests[manifest.checksum], made)
