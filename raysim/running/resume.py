"""Decision about a run from the state of its folder: begin, resume, show, or refuse."""

from __future__ import annotations

from typing import Literal

import yaml

from raysim.base.errors import Fault, RunExists, refuse
from raysim.config import Config
from raysim.folders.run_folder import RunFolder, changes
from raysim.plan.build import Plan
from raysim.running.record import reason_to_stop

#: begin: the run does not exist yet. resume: continue from the checkpoint, also with more rounds or another `stop`. show:
#: the run is finished, and its summary is returned.
Step = Literal["begin", "resume", "show"]

OTHER = "choose another name, or delete the folder"


def next_step(plan: Plan, folder: RunFolder, where: str) -> Step:
    """Return the next step for a plan and its run directory.

    Args:
      where: the folder, or its URI, for messages.
    Raises:
      RunExists: the folder holds a sweep, a finished run that cannot be extended to the plan (it has more rounds or has
        already met the plan's `stop`), or a run with a damaged configuration or partition.
      ConfigError: the run has another configuration or other data, or the plan has more rounds although earlier rounds
        depend on the number of rounds. Data are compared only if the settings are equal.
    """
    config, is_finished = plan.config, folder.status.name == "completed"
    if (folder.path / "sweep.yaml").exists():
        raise RunExists(f"{folder.name!r} is a sweep, not a run", where, "choose another name")
    if not folder.config.exists() and not is_finished:
        return "begin"
    try:
        before = Config.model_validate(folder.read_config()).model_dump(mode="json")
        is_same_partition = folder.read_json(folder.partition)["checksum"] == plan.manifest.checksum
    except (OSError, TypeError, ValueError, KeyError, yaml.YAMLError) as error:
        reason = f"cannot be resumed: config.yaml or partition.json is damaged ({error})"
        raise RunExists(f"run {folder.name!r} {'is finished' if is_finished else reason}", where, OTHER) from error
    now, rows = config.model_dump(mode="json"), folder.progress_rows()
    run = f"the {'finished' if is_finished else 'unfinished'} run in {where}"
    is_longer, has_other_stop = config.rounds > before["rounds"], now["stop"] != before["stop"]
    # With the new `stop`, the run would not have ended yet.
    goes_on = len(rows) < before["rounds"] and not reason_to_stop(config.stop, rows, config.evaluation.every)
    is_wanted = is_longer or (has_other_stop and goes_on)
    changed = {key: (old, new) for key, old, new in changes(before, now) if key != "rounds" or not is_longer}
    if is_finished and not is_wanted and (changed or has_other_stop) and changed.keys() <= {"rounds"}:
        mend = f"raise rounds to continue the run, {OTHER}"
        raise RunExists(f"run {folder.name!r} is finished", where, mend)
    faults = [
        Fault(key, f"is {new!r}, but {run} has {old!r}; set it back, or choose another name")
        for key, (old, new) in changed.items()
    ]
    if is_longer and plan.depends_on_length:
        text = f"{run} has {before['rounds']} rounds, and {plan.depends_on_length} depends on the number"
        faults.append(Fault("rounds", f"{text}; choose another name"))
    refuse(faults or _other_data(plan, folder, run, is_same_partition), f"resuming {folder.name!r}")
    return "show" if is_finished and not is_wanted else "resume"


def _other_data(plan: Plan, folder: RunFolder, run: str, is_same_partition: bool) -> list[Fault]:
    """Return the fault of a run whose partition or pretrained weights changed. run: description of the run."""
    if not is_same_partition:
        is_file = plan.config.partition.scheme.name == "file"
        key, what = ("partition.file", "the partition in the file") if is_file else ("data", "the set")
        return [Fault(key, f"{what} changed since {run} began; choose another name")]
    if not folder.weights.is_file() or folder.weights.read_bytes() == plan.weights_sha256.encode():
        return []
    model = plan.config.model
    place = model.pretrained or (model.name if model.name.startswith("transformers:") else "no file")
    text = f"the weights in {place} changed since {run} began"
    return [Fault("model.pretrained", f"{text}, or {folder.weights.name} there is damaged; choose another name")]
