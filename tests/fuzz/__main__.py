"""`python -m tests.fuzz [--seed N] [--share S] [--only TEXT]`: a table of counts, and every case that is not as it should be."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.cases import CASES, Ground
from tests.fuzz.verdicts import Table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0, help="of the first case of each kind")
    parser.add_argument("--share", type=float, default=1.0, help="of the cases of each kind")
    parser.add_argument("--only", default="", help="kinds whose name holds this")
    given = parser.parse_args()
    table = Table()
    with tempfile.TemporaryDirectory() as folder:
        ground = Ground(Path(folder))
        for kind, (case, count) in CASES.items():
            began = time.monotonic()
            for seed in range(
                given.seed, given.seed + max(1, round(count * given.share)) if given.only in kind else given.seed
            ):
                verdict = case(ground, seed)
                table.add(kind, verdict, seed)
                if verdict not in ("right", "sentence"):
                    print(f"{kind} {seed}: {verdict}", file=sys.stderr, flush=True)
            print(f"{kind}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(table)
    sys.exit(1 if table.bad else 0)


if __name__ == "__main__":
    main()
