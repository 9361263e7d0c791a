"""Places: where relative folders of a configuration begin, and where raysim's own files are."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from raysim.base.errors import DataError
from raysim.base.texts import LONGEST_NAME
from raysim.base.uri import is_uri
from raysim.config.schema import Config

#: Set by Ray for the entrypoint of a job. Its working directory is a temporary copy of what was uploaded.
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def shipped_folder(name: str) -> Path:
    """Return a shipped folder, `configs` or `cluster`: in the installed package, or in the checkout."""
    package = Path(__file__).parents[1]
    inside = package / name
    return inside if inside.is_dir() else package.parent / name


def home_folder() -> Path:
    """Where relative `storage` and `data.root` begin: RAYSIM_HOME, or ~/raysim-home in a Ray job, or the working directory.

    In a Ray job the working directory is never used, since Ray deletes it after the job, with all runs inside.

    Raises:
      DataError: RAYSIM_HOME names the home of an unknown user.
    """
    home = os.environ.get("RAYSIM_HOME")
    if home:
        return _of_a_user(home, "RAYSIM_HOME").absolute()
    return Path.home() / "raysim-home" if JOB_VARIABLE in os.environ else Path.cwd()


def located_path(path: Path) -> Path:
    """Return a path for reading: unchanged if it exists, else below the home folder. Raises as `path_to_write`."""
    return path if os.path.exists(path) else path_to_write(path)


def path_to_write(path: Path | str) -> Path:
    """Return a path of the command line: relative paths start at the home folder; `~` is expanded.

    Raises:
      DataError: unknown user, or a path that no system accepts.
    """
    if "\0" in str(path) or max(map(len, os.fsencode(path).split(b"/"))) > LONGEST_NAME:
        what = f"a path with NUL, or with a name of more than {LONGEST_NAME} bytes,"
        raise DataError(what, repr(str(path)[:60]), "give another path")
    return home_folder() / _of_a_user(path, "a path")


def _of_a_user(path: Path | str, name: str) -> Path:
    """Expand `~` in a path. Raises DataError: unknown user; `name` is the key of the path."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(f"{name} names the home of an unknown user", str(path), "write the whole path") from error


def located_root(root: str, name: str) -> str:
    """Return an absolute `data.root` for a set; a URI is unchanged."""
    if is_uri(root):
        return root
    here = Path(root).expanduser().absolute()
    return str(here if (here / name).is_dir() else home_folder() / Path(root).expanduser())


def located(config: Config) -> Config:
    """Return the configuration with absolute paths, which do not depend on the current folder.

    A prepared set that was uploaded with a job lies in the job's working directory; all other paths are below the home
    folder.
    """
    storage = config.storage if is_uri(config.storage) else str(home_folder() / Path(config.storage).expanduser())
    root = located_root(config.data.root, config.data.name)
    config = config.model_copy(update={"storage": storage, "data": config.data.model_copy(update={"root": root})})
    for name, key in (("data", "files"), ("partition", "file"), ("time", "traces")):
        group = getattr(config, name)
        if path := getattr(group, key, None):
            absolute_path = str(located_path(Path(path).expanduser()).absolute())
            config = config.model_copy(update={name: group.model_copy(update={key: absolute_path})})
    return config


def data_cache(config: Config) -> Path:
    """Where shards, and copies of remote sets, are kept: beside the prepared sets if these are local."""
    root, storage = config.data.root, config.storage
    if not is_uri(root):
        return Path(root).absolute()
    return cache_folder() / "data" if is_uri(storage) else (Path(storage) / "cache").absolute()


def cache_folder() -> Path:
    """Return the folder for copies from URIs: RAYSIM_CACHE, or raysim in XDG_CACHE_HOME or ~/.cache.

    Raises:
      DataError: the folder names the home of an unknown user.
    """
    given = os.environ.get("RAYSIM_CACHE")
    folder = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "raysim"
    return _of_a_user(folder, "RAYSIM_CACHE or XDG_CACHE_HOME").absolute()


def folder_of(place: str, kind: str) -> Path:
    """Return the local folder for a place: a folder unchanged; for a URI, a folder in the cache.

    Args:
      kind: "runs" for where runs work, "copies" for where they are read.
    """
    if not is_uri(place):
        return Path(place)
    words = re.sub(r"[^\w.-]+", "-", place.partition("?")[0])[-60:].strip("-")
    return cache_folder() / kind / f"{words}-{hashlib.sha256(place.rstrip('/').encode()).hexdigest()[:12]}"
