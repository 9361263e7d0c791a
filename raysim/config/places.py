"""Where relative folders of a configuration begin, and where the files are that come with raysim."""

from __future__ import annotations

import os
from pathlib import Path

from raysim.config.schema import Config

#: Set by Ray for the entrypoint of a job. Its working directory is a temporary copy of what was uploaded.
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def shipped_folder(name: str) -> Path:
    """A folder of files that come with raysim, `configs` or `cluster`: in the installed package, beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def home_folder() -> Path:
    """Where relative `storage` and `data.root` begin: RAYSIM_HOME, or ~/raysim-home in a Ray job, or the working directory.

    A job's working directory is deleted after it, and with it every run that it held; so it is never the answer there.
    """
    home = os.environ.get("RAYSIM_HOME")
    if home:
        return Path(home).expanduser().absolute()
    return Path.home() / "raysim-home" if JOB_VARIABLE in os.environ else Path.cwd()


def located_path(path: Path) -> Path:
    """A path that is to be read: as it is where it is there, else below the home folder."""
    return path if path.exists() else home_folder() / path.expanduser()


def located_root(root: str, name: str) -> str:
    """`data.root`, absolute, for the set of that name; a URI stays as it is."""
    if "://" in root:
        return root
    here = Path(root).expanduser().absolute()
    return str(here if (here / name).is_dir() else home_folder() / Path(root).expanduser())


def located(config: Config) -> Config:
    """The configuration with absolute paths, which a later change of directory does not move.

    A prepared set that was uploaded with a job lies in the job's working directory; all else lies below the home folder.
    """
    root = located_root(config.data.root, config.data.name)
    storage = str(home_folder() / Path(config.storage).expanduser())
    places = {"root": root}
    if config.data.files is not None:
        places["files"] = str(Path(config.data.files).expanduser().absolute())
    whole = {"storage": storage, "data": config.data.model_copy(update=places)}
    if config.partition.file is not None:
        here = Path(config.partition.file).expanduser().absolute()
        file = str(here if here.is_file() else home_folder() / Path(config.partition.file).expanduser())
        whole["partition"] = config.partition.model_copy(update={"file": file})
    return config.model_copy(update=whole)


def data_cache(config: Config) -> Path:
    """Where shards, and copies of remote sets, are kept: beside the prepared sets if these are local."""
    root = config.data.root
    return (Path(config.storage) / "cache" if "://" in root else Path(root)).absolute()
