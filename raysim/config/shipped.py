"""The files that come with raysim, by name: `paper:fedvg/table_A3`, `study:fedvg_digits`, `example:quickstart`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from raysim.base.errors import ConfigError, Fault, did_you_mean
from raysim.config.places import shipped_folder

#: Kind -> folder, and which of its files. A name is the path below the folder, without the pattern's ending.
KINDS = {
    "paper": ("configs", "papers", "*/*.yaml"),
    "study": ("configs", "studies", "*.yaml"),
    "example": ("configs", "", "*.yaml"),
    "mapping": ("configs", "mappings", "*.yaml"),
    "published": ("configs", "papers/published", "*.csv"),
    "cluster": ("cluster", "", "*"),
}

#: The kinds that are configurations of runs, sweeps and calibrations.
RECIPES = ("paper", "study", "example")


def shipped_files(kind: str) -> dict[str, Path]:
    """Full name -> file, of all files of a kind."""
    top, below, pattern = KINDS[kind]
    folder = shipped_folder(top) / below
    files = sorted(path for path in folder.glob(pattern) if path.is_file() and not path.name.startswith("__"))
    ending = Path(pattern).suffix
    return {f"{kind}:{file.relative_to(folder).as_posix().removesuffix(ending)}": file for file in files}


def shipped_file(name: str) -> Path:
    """Return the file of a name with or without the kind, if unambiguous.

    Raises:
      ConfigError: there is none; with the nearest names.
    """
    files = {full: file for kind in KINDS for full, file in shipped_files(kind).items()}
    matching = [full for full in files if name in (full, full.partition(":")[2])]
    if not matching:
        raise ConfigError([Fault(name, f"no file of raysim has this name. {hint(name, files)}")], "the call")
    return files[matching[0]]


def config_file(name: str | Path, beside: Path | None = None) -> Path:
    """Return the file of a configuration: a shipped file by name, other files by path.

    Args:
      beside: folder where a relative path begins; the working directory if not given.
    Raises:
      ConfigError: the name begins as one of raysim's, and there is no such file.
    """
    text = str(name)
    if is_recipe_name(text):
        files = recipes()
        if text not in files:
            raise ConfigError([Fault(text, f"no recipe has this name. {hint(text, files)}")], "the call")
        return files[text]
    return Path(name) if beside is None else beside / name


def is_recipe_name(text: str) -> bool:
    """Whether a text names a recipe of raysim and no path."""
    return text.partition(":")[0] in RECIPES and ":" in text


def recipes() -> dict[str, Path]:
    """Full name -> file, of all recipes."""
    return {full: file for kind in RECIPES for full, file in shipped_files(kind).items()}


def hint(name: str, candidates: Iterable[str]) -> str:
    """Return a sentence with the known full names nearest to a name."""
    return f"{did_you_mean(name, candidates, most=3)}`raysim recipes` lists the files of raysim"
