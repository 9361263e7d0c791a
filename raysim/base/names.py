"""Names that become folders: of prepared sets and of runs."""

from __future__ import annotations

#: Bytes of a file or folder name of ours: file systems take 255, and temporary names are longer than what they stand for.
LONGEST_NAME = 200


def name_fault(name: str, *, has_folders: bool = False) -> str:
    """What a name must be, where it is none that lies below the folder it is put in; empty where it is.

    Args:
      has_folders: whether `/` may stand in it, as in the names of runs.
    """
    parts = name.split("/") if has_folders else [name]
    if (longest := max(len(part.encode(errors="replace")) for part in parts)) > LONGEST_NAME:
        return f"must have at most {LONGEST_NAME} bytes in a folder's name, got {longest}"
    if all(part not in ("", ".", "..") and part.isprintable() and not {"/", "\\"} & {*part} for part in parts):
        return ""
    form = "names of folders with / between them" if has_folders else "the name of one folder, without / and \\"
    return f"must be {form}: not dots alone, no line ends or other control characters"
