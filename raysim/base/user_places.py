"""Places in the user's own code, of functions and of errors: file, line and function."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from raysim.base.errors import RaysimError, UserCodeError

_HOME = Path(__file__).resolve().parents[2]

#: Folders of code that is not the user's: raysim's, Python's, the installed libraries'.
_OTHERS = (
    *(str(_HOME / name) for name in ("raysim", "methods", "cluster")),
    *{str(Path(path).resolve()) for path in sysconfig.get_paths().values()},
)


def is_user_file(file: str) -> bool:
    """Whether a file of code is the user's."""
    if file.startswith("<frozen") or {"site-packages", "dist-packages"} & set(Path(file).parts):
        return False
    whole = str(Path(file).resolve())
    return not any(whole == folder or whole.startswith(f"{folder}/") for folder in _OTHERS)


def without_partials(function: Callable[..., object]) -> Callable[..., object]:
    """Return the function inside partials."""
    return without_partials(function.func) if isinstance(function, partial) else function


def place_in(error: BaseException) -> str:
    """Return "FILE, line 7, in forward": the innermost place of an error in the user's code; empty if none."""
    if isinstance(error, SyntaxError) and error.filename and is_user_file(error.filename):
        return f"{error.filename}, line {error.lineno}"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"
    return ""


def place_of(function: Callable[..., object]) -> str:
    """ "FILE, line 3, in my_net": where a function or class is written."""
    function = without_partials(function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        source = inspect.unwrap(function)
        name = getattr(source, "__qualname__", name)
        file, line = inspect.getsourcefile(source), inspect.getsourcelines(source)[1]
    except (OSError, TypeError):  # typed at a prompt, or no plain function
        code = getattr(function, "__code__", None)
        return f"{code.co_filename}, line {code.co_firstlineno}, in {name}" if code else name
    return f"{file}, line {line}, in {name}"


def words_of(error: BaseException) -> str:
    """Return "ValueError: message"."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def accepts(function: Callable[..., object], count: int) -> bool:
    """Return whether a function accepts the given number of arguments; true if the signature is unknown."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


@contextmanager
def user_errors(function: Callable[..., object] | None = None) -> Iterator[None]:
    """Turn an error raised in the user's code into one message with file and function; other errors pass.

    Args:
      function: the user's function that is called inside; every error raised inside is then attributed to it.
    Raises:
      UserCodeError: in place of any error but a RaysimError.
    """
    try:
        yield
    except RaysimError:
        raise
    except (Exception, SystemExit) as error:  # `sys.exit()` inside it would end the run with status 0
        place = place_in(error) or (place_of(function) if function is not None else "")
        if not place:
            raise
        fault = UserCodeError(words_of(error), place)
        fault.add_note(traceback.format_exc())  # for the file FAILED: it survives the way from another process
        raise fault from error
