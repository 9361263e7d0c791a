"""The configuration of a run with the names of its methods checked, before PyTorch is imported."""

from __future__ import annotations

from methods import METHODS
from raysim.base.errors import Fault
from raysim.base.settings import Settings, Spec
from raysim.config import Config, parse_config, unknown, without


def parsed_run(raw: Settings) -> tuple[Config | None, list[Fault]]:
    """Parse the configuration of a run, and check the names of methods.

    Returns:
      (configuration, or None if there are faults; the faults).
    """
    config, faults = parse_config(raw)
    specs = without(raw, faults).get("methods")
    for index, spec in enumerate(specs if isinstance(specs, list) else []):
        name = Spec.of(spec).name
        if ":" not in name and name not in set(METHODS):
            faults.append(Fault(f"methods[{index}]", unknown(name, METHODS, "method")))
    return (None if faults else config), faults
