"""`python -m tests.fuzz`: a table of counts, and every case that is not as it should be.

It takes an hour on two cores. With `--results FILE --seconds 80` it does a part, and the same command goes on with what
FILE does not hold; the table is of all that FILE holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.cases import CASES, Ground
from tests.fuzz.verdicts import Table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[0], help="of the first case of each kind; several: so many draws"
    )
    parser.add_argument("--share", type=float, default=1.0, help="of the cases of each kind")
    parser.add_argument("--only", nargs="+", default=[""], help="kinds whose name holds one of these, in this order")
    parser.add_argument("--results", type=Path, help="verdicts so far, a line each; these cases are not run again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further case begins")
    given = parser.parse_args()
    given.results = given.results and given.results.resolve()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # a case ends what it started
    verdicts: dict[tuple[str, int], str] = {}
    if given.results is not None and given.results.is_file():
        for line in given.results.read_text().splitlines():
            kind, seed, verdict = json.loads(line)
            verdicts[kind, seed] = verdict
    due = [
        (kind, seed)
        for kind in dict.fromkeys(kind for part in given.only for kind in CASES if part in kind)
        for first in given.seed
        for seed in range(first, first + max(1, round(CASES[kind][1] * given.share)))
        if (kind, seed) not in verdicts
    ]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # where wrong relative paths begin
        ground = Ground(Path(folder))
        began = time.monotonic()
        for kind, seed in due:
            if time.monotonic() - began > given.seconds:
                break
            verdict = verdicts[kind, seed] = CASES[kind][0](ground, seed)
            if given.results is not None:
                with open(given.results, "a") as file:
                    file.write(json.dumps([kind, seed, verdict]) + "\n")
            if verdict not in ("right", "sentence"):
                print(f"{kind} {seed}: {verdict}", file=sys.stderr, flush=True)
    table = Table()
    for (kind, seed), verdict in verdicts.items():
        table.add(kind, verdict, seed)
    print(table)
    if left := len(set(due) - set(verdicts)):
        print(f"{left} cases are left: the same command goes on")
    return 1 if table.bad else 0


if __name__ == "__main__":
    sys.exit(main())
