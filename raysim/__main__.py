"""Entry point of the command; Ctrl-C during imports also ends it with one line."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

STOPPED = "stopped by Ctrl-C; the same command starts from the beginning\n"


def main() -> None:
    """Run the verb of the command line, and end the process with the verb's status."""
    try:
        try:
            before = signal.getsignal(signal.SIGINT)
            if before is signal.default_int_handler:
                signal.signal(signal.SIGINT, _end)
            from raysim.cli.main import main as run_verb

            if before is signal.default_int_handler:
                signal.signal(signal.SIGINT, _interrupt)
                signal.signal(signal.SIGALRM, _interrupt)
            run_verb()
        except SystemExit as end:
            if _is_interrupt(end):
                raise KeyboardInterrupt from end
            raise
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would only disturb the end of Ray
        sys.stderr.write(STOPPED)
        sys.exit(128 + signal.SIGINT)


def _end(*_: object) -> None:
    """End this process at once: an import has many callbacks, and Python drops a KeyboardInterrupt in a callback."""
    os.write(2, STOPPED.encode())
    os._exit(128 + signal.SIGINT)


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, during an import 10 ms later: Python drops a KeyboardInterrupt in import callbacks."""
    if frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        return
    raise KeyboardInterrupt


def _is_interrupt(end: SystemExit) -> bool:
    """Return whether typer raised an exit while handling a KeyboardInterrupt."""
    import typer

    return isinstance(end.__context__, typer.Exit) and isinstance(end.__context__.__cause__, KeyboardInterrupt)


if __name__ == "__main__":
    main()
