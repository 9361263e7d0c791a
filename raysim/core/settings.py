"""The one name of what comes out of a YAML or JSON file, where anything may stand."""

from __future__ import annotations

from typing import Any

#: Keys and values as a file holds them, before they are checked or after they are written back.
Settings = dict[str, Any]
