"""What a command printed."""

from __future__ import annotations


def in_order(output: str, *parts: str) -> None:
    """Assert that the parts stand in the output one after the other."""
    at = 0
    for part in parts:
        place = output.find(part, at)
        assert place >= 0, f"{part!r} is missing after {output[:at][-80:]!r} in:\n{output}"
        at = place + len(part)
