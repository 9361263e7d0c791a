"""Where the command begins: what ends it while its modules are still imported is one line, too."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the verb of the command line; ends the process with its status."""
    try:
        try:
            from raysim.cli.main import main as run_verb

            run_verb()
        except SystemExit as end:
            if _is_interrupt(end):
                raise KeyboardInterrupt from end
            raise
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would only disturb the end of Ray
        sys.stderr.write("stopped by Ctrl-C; the same command begins anew\n")
        sys.exit(128 + signal.SIGINT)


def _is_interrupt(end: SystemExit) -> bool:
    """Whether typer made this exit of a KeyboardInterrupt: it raises Exit from that, and this exit while it handles it."""
    import typer

    return isinstance(end.__context__, typer.Exit) and isinstance(end.__context__.__cause__, KeyboardInterrupt)


if __name__ == "__main__":
    main()
