"""Errors for users: cause with value, place, and remedy. Credentials in URIs are masked."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from raysim.base.texts import round_name
from raysim.base.uri import masked

#: A very long word of a message, which is cut; names of files have at most 255 letters.
_LONG_WORD = re.compile(r"[^\s/]{300,}")


def printed(text: str) -> str:
    """Return a message for display: credentials masked, very long words cut."""
    return masked(_LONG_WORD.sub(lambda word: f"{word[0][:60]}... ({len(word[0]):,} letters)", text))


class RaysimError(Exception):
    """Base of all errors that users can fix; prints as one message. All arguments pickle."""

    def __init__(self, what: str, where: str = "", mend: str = ""):
        super().__init__(what, where, mend)
        self.what, self.where, self.mend = what, where, mend

    def __str__(self) -> str:
        text = self.what + (f" in {self.where}" if self.where else "")
        return printed(text + (f". {self.mend[:1].upper()}{self.mend[1:]}" if self.mend else ""))


class SettingIgnored(UserWarning):
    """A setting has no effect and was left out."""


def did_you_mean(name: str, candidates: Iterable[str], *, most: int = 1) -> str:
    """`Did you mean 'fedvg'? ` with the nearest of the known names; empty if none is near."""
    near = difflib.get_close_matches(name, list(dict.fromkeys(candidates)), n=most)
    return f"Did you mean {' or '.join(map(repr, near))}? " if near else ""


@dataclass(frozen=True)
class Fault:
    """A fault of the configuration: key, cause and remedy."""

    key: str
    message: str

    def __str__(self) -> str:
        return printed(f"{self.key}: {self.message}")


class ConfigError(RaysimError):
    """Every fault of a configuration at once."""

    def __init__(self, faults: Sequence[Fault], source: str = "the configuration"):
        Exception.__init__(self, tuple(faults), source)
        self.faults, self.source = tuple(faults), source

    def __str__(self) -> str:
        count = len(self.faults)
        head = f"{count} fault{'s' if count != 1 else ''} in {self.source}"
        return "\n".join([head, *(f"  {fault}" for fault in self.faults)])


class DataError(RaysimError):
    """A data file or a partition that cannot be used."""


def refuse(faults: Iterable[Fault], source: str) -> None:
    """Raise ConfigError unless the list of faults is empty."""
    if all_faults := tuple(faults):
        raise ConfigError(all_faults, source)


@contextmanager
def explained(
    what: str, where: Path | str, mend: str, *kinds: type[Exception], to: type[RaysimError] = DataError
) -> Iterator[None]:
    """Turn errors of the given kinds into DataError, or into type `to`; the original message follows `what` in
    parentheses. RaysimErrors pass unchanged.
    """
    try:
        yield
    except RaysimError:
        raise
    except kinds as error:
        raise to(f"{what} ({' '.join(str(error).split())})", str(where), mend) from error


class MethodError(RaysimError):
    """Methods that cannot be combined, or a hook with a broken contract."""


class ModelError(RaysimError):
    """Pretrained weights that are unavailable or do not fit the model."""


class UserCodeError(RaysimError):
    """A user's function that is unusable or failed; `where` names the file and the function."""


class UserNameError(UserCodeError, LookupError):
    """A name without a usable function of the user."""


class ClientError(RaysimError):
    """A client failed: carries the original type, message and place, the client id, the round, the block and the worker.

    The traceback is a note, for the file FAILED.
    """

    def __init__(self, client: int, round_index: int, block: int, worker: str, cause: str):
        Exception.__init__(self, client, round_index, block, worker, cause)
        self.client, self.round_index, self.block, self.worker = client, round_index, block, worker
        self.cause = cause

    def __str__(self) -> str:
        where = f"{round_name(self.round_index)} (block {self.block}, {self.worker})"
        return printed(f"client {self.client} failed in {where}: {self.cause}")


class OutOfMemory(RaysimError):
    """Out of device memory; fewer trainers per device may help."""


class ClusterLost(RaysimError):
    """The server of a run, its node, or the cluster connection is lost; the run can resume from the last checkpoint."""


class RunExists(RaysimError):
    """The run directory holds a finished run, which is never overwritten."""
