"""The configuration: one typed schema, read from YAML and `a.b=c` overrides, all faults at once."""

from raysim.config.faults import nearest, parse_options, unknown
from raysim.config.method_lists import methods_label
from raysim.config.places import (
    JOB_VARIABLE,
    data_cache,
    folder_of,
    home_folder,
    located,
    located_path,
    path_to_write,
    shipped_folder,
)
from raysim.config.reading import parse_config, parse_overrides, parse_report, read_config, sound_config, without
from raysim.config.schema import CohortGroup, Config, ModelGroup, ReportGroup, StopGroup, TuneGroup
from raysim.config.shipped import is_recipe_name, shipped_file, shipped_files
