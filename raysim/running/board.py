"""TensorBoard events of a run: curves, histograms, pictures, and settings with results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

#: Group of the curves in MAIN. TensorBoard sorts groups by name and opens the first two. The curves are also in the
#: groups of their names in progress.csv.
FIRST = "accuracy and loss"
MAIN = ("server/accuracy", "server/loss", "server/validation_accuracy", "server/validation_loss", "train/loss")


class Board:
    """Writer of a run's TensorBoard events.

    Args:
      folder: the run directory.
      first_round: above 0 for a resumed run; TensorBoard then drops earlier points of this round and of later rounds.
    """

    def __init__(self, folder: Path, first_round: int):
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard reads files in the order of their names, which hold the second of creation. A file that an earlier
        # process created in the same second might be read after this one, and this file's points would be dropped.
        while first_round and list(folder.glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
            time.sleep(0.02)
        self._writer = SummaryWriter(str(folder), purge_step=first_round or None)

    def points(self, number: int, metrics: Mapping[str, float]) -> None:
        """Write a point of each curve; with simulated time, TensorBoard's axis RELATIVE shows the simulated time."""
        first = {f"{FIRST}/{tag}": value for tag, value in metrics.items() if tag in MAIN}
        self._write(number, {**metrics, **first}, metrics.get("time/simulated_s"))

    def _write(self, number: int, values: Mapping[str, float], time_s: float | None = None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all points: `add_scalar` writes an event for each, and blocks if ten events are not yet written.
        if values:
            points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            self._add(Summary(value=points), number, time_s)

    def histogram(self, tag: str, number: int, values: np.ndarray) -> None:
        self._writer.add_histogram(tag, values, number)

    def picture(self, tag: str, number: int, png: bytes, size: tuple[int, int]) -> None:
        """Write a picture. png: contents of a PNG file; size: (width, height) in pixels."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        image = Summary.Image(width=size[0], height=size[1], colorspace=3, encoded_image_string=png)
        self._add(Summary(value=[Summary.Value(tag=tag, image=image)]), number)

    def hyperparameters(self, settings: Mapping[str, object], number: int, results: Mapping[str, float | None]) -> None:
        """Write settings and last results for the hyper-parameter view. number: index of the last round."""
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
        from torch.utils.tensorboard.summary import hparams

        self._write(number, {name: result for name, result in results.items() if result is not None})
        experiment, start, end = hparams(settings, results)
        # The view shows few columns, first those marked as `differs`: the labels of a sweep, else methods and seed.
        labels = [name for name in settings if name.startswith("labels.")] or ["methods", "seed"]
        data = experiment.value[0].metadata.plugin_data
        content = HParamsPluginData.FromString(data.content)
        for info in content.experiment.hparam_infos:
            info.differs = info.name in labels
        data.content = content.SerializeToString()
        for summary in (experiment, start, end):
            self._add(summary)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add(self, summary: object, number: int | None = None, time_s: float | None = None) -> None:
        self._writer._get_file_writer().add_summary(summary, number, time_s)
