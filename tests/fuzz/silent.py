"""Cases whose wrong result nobody would notice. Each returns whether the result is right, or raises a sentence."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import raysim
from raysim.plan.check import check
from raysim.running.runner import execute

OWN = "tests.fuzz.own_code"
Case = Callable[[random.Random, dict[str, Any], Path, Path], bool]


def partition_file(path: Path, rows: list[tuple[int, int | str, str]]) -> dict[str, Any]:
    """The group `partition` of a file with (example, client, split) rows."""
    path.write_text("example,client,split\n" + "".join(f"{row},{client},{split}\n" for row, client, split in rows))
    return {"scheme": "file", "file": str(path), "num_clients": 3}


def owned(rng: random.Random) -> list[tuple[int, int | str, str]]:
    """Rows of digits for three clients, each with test rows of its own."""
    return [(row, rng.randrange(3), "test" if row % 5 == 0 else "train") for row in range(1797)]


def other_owners(rng: random.Random, raw: dict[str, Any], here: Path, root: Path) -> bool:
    """Two files that differ in the owner of one test row are two partitions."""
    rows = owned(rng)
    row = 5 * rng.randrange(359)
    others = [(each, (client + 1) % 3 if each == row else client, split) for each, client, split in rows]
    sums = [
        check(raw | {"partition": partition_file(here / f"{number}.csv", chosen)}, "a case").manifest.checksum
        for number, chosen in enumerate((rows, others))
    ]
    return sums[0] != sums[1]


def no_training_row(rng: random.Random, raw: dict[str, Any], here: Path, root: Path) -> bool:
    """A partition in which nobody trains is refused."""
    rows: list[tuple[int, int | str, str]] = [(row, "", rng.choice(("test", "unused"))) for row in range(1797)]
    execute(check(raw | {"partition": partition_file(here / "p.csv", rows), "cohort": {"size": 2}}, "a case"))
    return False


def writing_metric(rng: random.Random, raw: dict[str, Any], here: Path, root: Path) -> bool:
    """A metric that writes into its logits does not change the others, whatever their order."""
    scores = []
    for names in (["plain_metric"], rng.sample(["metric", "plain_metric"], 2)):
        metrics = {"evaluation": {"metrics": [f"{OWN}:{name}" for name in names]}, "name": f"run-{len(scores)}"}
        execute(check(raw | metrics, "a case"))
        scores.append(raysim.load(here / "runs" / f"run-{len(scores)}").history["server/plain_metric"].tolist())
    return bool(scores[0] == scores[1])


def same_logger_twice(rng: random.Random, raw: dict[str, Any], here: Path, root: Path) -> bool:
    """It is refused: one of the two would be told nothing."""
    check(raw | {"loggers": [f"{OWN}:logger"] * 2}, "a case")
    return False


def least_examples(rng: random.Random, raw: dict[str, Any], here: Path, root: Path) -> bool:
    """A number of examples that a scheme does not give every client is refused."""
    scheme, fewest = rng.choice(("nine_plus_one", "shards", "iid", "quantity")), rng.choice((2, 50, 900))
    part = {"scheme": scheme, "num_clients": 6, "min_samples": fewest}
    return bool(check(raw | {"partition": part}, "a case").manifest.sizes.min() >= fewest)


def other_shape(rng: random.Random, raw: dict[str, Any], here: Path, root: Path) -> bool:
    """A shape of the same number of pixels that is not the file's."""
    shutil.copytree(root, here / "data")
    path = here / "data" / "digits" / "digits.json"
    fields = json.loads(path.read_text()) | {
        "shape": rng.choice(([4, 16, 1], [16, 4, 1], [4, 4, 4], [64, 1, 1], [8, 4, 2]))
    }
    path.write_text(json.dumps(fields))
    check(raw | {"data": raw["data"] | {"root": str(here / "data")}}, "a case")
    return False


def changed_digit(rng: random.Random, raw: dict[str, Any], here: Path, root: Path) -> bool:
    """One digit of an unfinished run's rows is changed; then the run goes on."""
    from raysim.engine.simulation import Stopped

    def stop(record: Any) -> None:
        if record.round_index == 1:
            raise Stopped

    raw = raw | {"rounds": 4, "checkpoint": {"every_s": 0}}
    whole = execute(check(raw | {"name": "whole"}, "a case"))
    with contextlib.suppress(Stopped):
        execute(check(raw, "a case"), on_round=stop)
    path = here / "runs" / raw["name"] / "progress.csv"
    lines = path.read_text().splitlines(keepends=True)
    # Columns of seconds differ from run to run; those of results do not.
    columns = [place for place, name in enumerate(lines[0].strip().split(",")) if name.startswith("server/")]
    cells = lines[1].split(",")
    cell = rng.choice([place for place in columns if any(letter in "12345678" for letter in cells[place])])
    place = rng.choice([place for place, letter in enumerate(cells[cell]) if letter in "12345678"])
    cells[cell] = cells[cell][:place] + "9" + cells[cell][place + 1 :]
    path.write_text("".join([lines[0], ",".join(cells), *lines[2:]]))
    resumed = execute(check(raw, "a case"))
    same = ("params_sha256", "accuracy", "best_accuracy", "best_round")
    return all(resumed.get(key) == whole.get(key) for key in same) and raysim.load(path.parent).history.equals(
        raysim.load(here / "runs" / "whole").history
    )


def control_characters(rng: random.Random, raw: dict[str, Any], here: Path, root: Path) -> bool:
    """No control character and no formula of a label stands in a report."""
    bad = rng.choice(("\x1b[2Jx", "a\n# heading", "a\r\nb", "=cmd|' /C calc'!A0", "+1", "@x", "a\x07", "\x9b2Jx"))
    execute(check(raw | {"labels": {"method": bad}}, "a case"))
    raysim.report([here / "runs" / raw["name"]], out=here / "report")
    texts = [path.read_text(errors="replace") for path in (here / "report").glob("*") if path.suffix in (".md", ".csv")]
    has_control = any(
        letter != "\n" and (ord(letter) < 32 or 127 <= ord(letter) < 160) for text in texts for letter in text
    )
    cells = [cell.strip('" ') for text in texts for line in text.splitlines() for cell in line.split(",")]
    has_formula = any(cell.startswith(("=", "@")) for cell in cells)
    has_heading = any(line.startswith("# heading") for text in texts for line in text.splitlines())
    return not (has_control or has_formula or has_heading)


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        *(other_owners, no_training_row, writing_metric, same_logger_twice, least_examples, other_shape, changed_digit),
        control_characters,
    )
}
