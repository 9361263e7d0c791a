"""raysim: a federated-learning simulator for research that runs on Ray, from a laptop to a cluster.

    import raysim
    run = raysim.run("configs/quickstart.yaml", rounds=5)

Every name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysim.base import __version__

if TYPE_CHECKING:
    from raysim.api import arrays as arrays
    from raysim.api import report as report
    from raysim.api import run as run
    from raysim.api import table as table
    from raysim.api import tune as tune
    from raysim.base.errors import ConfigError as ConfigError
    from raysim.base.errors import DataError as DataError
    from raysim.base.errors import RaysimError as RaysimError
    from raysim.base.errors import UserCodeError as UserCodeError
    from raysim.core.method import Method as Method
    from raysim.engine.round_metrics import RoundRecord as RoundRecord
    from raysim.plan.find import methods as methods
    from raysim.reporting.report import Report as Report
    from raysim.running.results import Run as Run
    from raysim.running.results import Runs as Runs
    from raysim.running.results import load as load
    from raysim.training.tasks import Task as Task

_HOMES = dict.fromkeys(("run", "tune", "report", "arrays", "table"), "raysim.api")
_HOMES |= dict.fromkeys(("RaysimError", "ConfigError", "DataError", "UserCodeError"), "raysim.base.errors")
_HOMES |= dict.fromkeys(("Run", "Runs", "load"), "raysim.running.results") | {"methods": "raysim.plan.find"}
_HOMES |= {"Report": "raysim.reporting.report", "RoundRecord": "raysim.engine.round_metrics"}
_HOMES |= {"Method": "raysim.core.method", "Task": "raysim.training.tasks"}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'raysim' has no attribute {name!r}")
    from importlib import import_module

    from raysim.base.user_code import refuse_shadows

    refuse_shadows()
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
