"""Names that become folders: of prepared sets and of runs."""

from __future__ import annotations


def name_fault(name: str, *, has_folders: bool = False) -> str:
    """What a name must be, where it is none that lies below the folder it is put in; empty where it is.

    Args:
      has_folders: whether `/` may stand in it, as in the names of runs.
    """
    parts = name.split("/") if has_folders else [name]
    if all(part not in ("", ".", "..") and part.isprintable() and not {"/", "\\"} & {*part} for part in parts):
        return ""
    form = "names of folders with / between them" if has_folders else "the name of one folder, without / and \\"
    return f"must be {form}, not of dots alone, without line ends and other control characters"
