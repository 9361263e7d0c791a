"""The configuration: one typed schema, read from YAML and `a.b=c` overrides, all faults at once."""

from raysim.config.faults import nearest, parse_options
from raysim.config.places import JOB_VARIABLE, home_folder, located, located_root
from raysim.config.reading import parse_config, parse_report, read_config
from raysim.config.schema import FORMS, CalibrateGroup, CohortGroup, Config, PartitionGroup, ReportGroup, TuneGroup

__all__ = [
    "FORMS",
    "JOB_VARIABLE",
    "CalibrateGroup",
    "CohortGroup",
    "Config",
    "PartitionGroup",
    "ReportGroup",
    "TuneGroup",
    "home_folder",
    "located",
    "located_root",
    "nearest",
    "parse_config",
    "parse_options",
    "parse_report",
    "read_config",
]
