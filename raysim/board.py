"""What TensorBoard shows of a run: curves, histograms, pictures, and the settings beside the results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np


class Board:
    """The TensorBoard events of a run, in its directory.

    Args:
      first_round: above 0 for a run that goes on; what an earlier process wrote of it and of later rounds does not count.
    """

    def __init__(self, folder: Path, first_round: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_round or None)

    def points(self, number: int, metrics: Mapping[str, float]) -> None:
        """A point of each curve."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all: `add_scalar` writes one for each, and waits whenever ten of them are on their way to the file.
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        self._add(Summary(value=values), number)

    def histogram(self, tag: str, number: int, values: np.ndarray) -> None:
        self._writer.add_histogram(tag, values, number)

    def picture(self, tag: str, number: int, png: bytes, size: tuple[int, int]) -> None:
        """A PNG file of (width, height) pixels."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        image = Summary.Image(width=size[0], height=size[1], colorspace=3, encoded_image_string=png)
        self._add(Summary(value=[Summary.Value(tag=tag, image=image)]), number)

    def hyperparameters_at_start(self, settings: Mapping[str, object]) -> None:
        """Columns of the hyper-parameter view."""
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
        from torch.utils.tensorboard.summary import hparams

        metrics = {"server/accuracy": None, "hparam/best_accuracy": None, "hparam/mean_last_10pct_accuracy": None}
        experiment, start, _ = hparams(settings, metrics)
        # The view shows the first few columns, those that "differ" in front: what a sweep varies, and not the alphabet.
        labels = [name for name in settings if name.startswith("labels.")] or ["methods", "seed"]
        data = experiment.value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(data.content)
        for info in content.experiment.hparam_infos:
            info.differs = info.name in labels
        data.content = content.SerializeToString()
        for summary in (experiment, start):
            self._add(summary)

    def hyperparameters_at_end(
        self, settings: Mapping[str, object], number: int, results: Mapping[str, float | None]
    ) -> None:
        """The results of the run in that view, as of its last round; None where there is none."""
        from torch.utils.tensorboard.summary import hparams

        for name, result in results.items():
            if result is not None:
                self.points(number, {f"hparam/{name}": result})
        self._add(hparams(settings, {})[2])

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, summary: object, number: int | None = None) -> None:
        self._writer._get_file_writer().add_summary(summary, number)
