"""`scheme: file`: a partition that a run wrote, read back, gives the same bits; a fault in the file is one sentence."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import raysim
from raysim.base.errors import ConfigError
from raysim.cli.partitions import _write, partitions
from raysim.data import division
from raysim.data.division import table_file
from raysim.plan.check import check
from tests.fuzz.verdicts import limited
from tests.support.federations import SMALL, plan_of


@pytest.fixture
def settings(settings: dict[str, object]) -> dict[str, object]:
    return {**settings, "rounds": 2, "methods": ["fedvg"]}


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, str]]) -> str:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"data": {"split_within_clients": True}},
        {"data": {"split_within_clients": True, "validation_set": {"order": "client"}}},
        {"data": {"validation": 0.3, "validation_set": {"imbalance": 0.7, "label_noise": 0.2, "subset": 0.8}}},
        {"partition": {"scheme": "nine_plus_one"}},
        {"partition": {"scheme": "shards"}},
        {"partition": {"scheme": "quantity", "form": "power", "seed": 9}},
    ],
)
def test_a_partition_of_any_scheme_read_back_gives_the_same_bits(settings, given):
    drawn = raysim.run(settings, given, name="drawn", quiet=True)
    file = {"scheme": "file", "form": None, "file": str(drawn.folder / "examples.csv")}
    read = raysim.run(settings, given, name="read", partition={**given.get("partition", {}), **file}, quiet=True)
    for fact in ("params_sha256", "partition_sha256", "accuracy"):
        assert read.summary[fact] == drawn.summary[fact]
    assert (read.folder / "examples.csv").read_text() == (drawn.folder / "examples.csv").read_text()
    splits = [row["split"] for row in rows_of(read.folder / "examples.csv")]
    assert len(splits) == 1797
    assert ("unused" in splits) == (given.get("partition", {}).get("scheme") == "nine_plus_one")


@pytest.mark.slow
def test_joint_training_is_read_back_as_one_client(settings):
    drawn = raysim.run(settings, name="drawn", partition={"scheme": "joint"}, quiet=True)
    file = {"scheme": "file", "file": str(drawn.folder / "examples.csv"), "num_clients": 1}
    read = raysim.run(settings, name="read", partition=file, cohort={"size": 1}, quiet=True)
    assert read.summary["params_sha256"] == drawn.summary["params_sha256"]


def test_every_form_of_the_file_and_any_order_of_its_rows_gives_the_same_partition(settings, tmp_path, monkeypatch):
    (drawn,) = partitions({**settings, "seed": 3}, "a test")
    rows = rows_of(_write(drawn, tmp_path) / "examples.csv")
    monkeypatch.setattr(division, "MOST_CSV_ROWS", 1796)
    numbers = [{**row, "example": int(row["example"]), "client": int(row["client"] or -1)} for row in rows]
    for row in numbers:
        row["client"] = None if row["client"] < 0 else row["client"]
    trained = [row for row in numbers if row["split"] == "train"]
    (tmp_path / "list.json").write_text(json.dumps(numbers))
    held = {str(client): [row["example"] for row in trained if row["client"] == client] for client in range(6)}
    (tmp_path / "held.json").write_text(json.dumps(held))
    write_rows(tmp_path / "back.csv", rows[::-1])
    write_rows(tmp_path / "two.csv", [{"client": row["client"], "example": row["example"]} for row in trained])
    suffix, content = table_file(drawn.manifest.division.table)
    assert suffix == ".parquet"
    (tmp_path / "long.parquet").write_bytes(content)
    for name in ("list.json", "held.json", "back.csv", "two.csv", "long.parquet"):
        file = {"scheme": "file", "file": str(tmp_path / name), "num_clients": 6}
        (read,) = partitions({**settings, "partition": file}, "a test")
        assert read.manifest.checksum == drawn.manifest.checksum, name


def changed(rows: list[dict[str, str]], example: int, /, **values: str) -> list[dict[str, str]]:
    return [{**row, **values} if row["example"] == str(example) else row for row in rows]


@pytest.fixture(scope="module")
def whole(root, tmp_path_factory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("whole")
    (drawn,) = partitions({**SMALL, "data": {"root": str(root), "split_within_clients": True}}, "a test")
    return rows_of(_write(drawn, folder) / "examples.csv")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda rows: changed(rows, 5, example="1797"), r"example 1797 of a set with 1797 in partition file .*spoilt"),
        (lambda rows: changed(rows, 5, example="6"), "example 6 appears 2 times"),
        (lambda rows: rows[:5] + rows[6:], r"example 5 is missing \(1 of 1797 in all\)"),
        (lambda rows: changed(rows, 5, client="6"), r"example 5 belongs to client 6 of 6.*num_clients to 7"),
        (
            lambda rows: changed(rows, 5, client="", split="train"),
            "example 5, which is to be trained on, has no client",
        ),
        (
            lambda rows: changed(rows, 5, client="", split="test"),
            r"test example 5 has no client, and example \d+ has one",
        ),
        (lambda rows: changed(rows, 5, split="dev"), "split 'dev' of example 5.*Choose one of train, validation"),
        (lambda rows: changed(rows, 5, client="two"), "cannot be read .*two"),
        (lambda rows: changed(rows, 5, example=""), "cannot be read .*a row has no example"),
        (lambda rows: [{"example": row["example"]} for row in rows], "no column client; there is example"),
        (
            lambda rows: [{k: row[k] for k in ("example", "client")} for row in rows[1:]],
            "example 0, which is to be trained on, has no client",
        ),
    ],
)
def test_a_fault_in_the_file_is_one_sentence(settings, whole, tmp_path, spoil, message):
    file = write_rows(tmp_path / "spoilt.csv", spoil(whole))
    within = {"split_within_clients": True, **settings["data"]}
    with pytest.raises(ConfigError, match=message) as caught:
        raysim.run(settings, data=within, partition={"scheme": "file", "file": file}, quiet=True)
    (fault,) = caught.value.faults
    assert fault.key == "partition"


def test_a_missing_or_damaged_file_and_idle_keys_are_faults(settings, tmp_path):
    (tmp_path / "bad.json").write_text("[{")
    for partition, message in (
        ({"scheme": "file"}, r"partition\.file: is missing"),
        ({"file": "a.csv"}, r"partition\.file: has no effect with partition\.scheme dirichlet"),
        ({"scheme": "file", "file": str(tmp_path / "no.csv")}, "No such file"),
        ({"scheme": "file", "file": str(tmp_path / "bad.json")}, r"bad\.json.*Write example,client"),
        ({"scheme": "file", "file": str(tmp_path)}, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            raysim.run(settings, partition=partition, quiet=True)


@pytest.mark.slow
def test_content_of_the_file_counts_and_not_its_path(settings, tmp_path):
    drawn = raysim.run(settings, name="drawn", quiet=True)
    rows = rows_of(drawn.folder / "examples.csv")
    first, other = write_rows(tmp_path / "a.csv", rows), write_rows(tmp_path / "b.csv", rows)
    raysim.run(settings, name="run", partition={"scheme": "file", "file": first}, quiet=True)
    moved = {"scheme": "file", "file": other}
    longer = raysim.run(settings, name="run", rounds=3, partition=moved, quiet=True)
    assert longer.summary["rounds"] == 3
    again = raysim.run(settings, name="run", rounds=3, partition=moved, quiet=True)
    assert again.summary == longer.summary
    trained = next(int(row["example"]) for row in rows if row["split"] == "train")
    write_rows(Path(other), changed(rows, trained, split="unused", client=""))
    with pytest.raises(
        ConfigError, match=r"partition\.file: the partition in the file changed since the finished run in"
    ):
        raysim.run(settings, name="run", rounds=4, partition=moved, quiet=True)
    again = raysim.run(settings, name="another", partition=moved, quiet=True)
    assert again.summary["partition_sha256"] != drawn.summary["partition_sha256"]


@pytest.mark.usefixtures("ray_cluster")
def test_trials_on_files_are_told_apart_and_notice_a_changed_file(settings, tmp_path, monkeypatch):
    drawn = raysim.run(settings, name="drawn", quiet=True)
    rows = rows_of(drawn.folder / "examples.csv")
    trained = next(int(row["example"]) for row in rows if row["split"] == "train")
    write_rows(tmp_path / "a.csv", rows)
    write_rows(tmp_path / "b.csv", changed(rows, trained, split="unused", client=""))
    monkeypatch.chdir(tmp_path)  # trials run elsewhere
    axes = {"partition.file": {"grid_search": ["a.csv", "b.csv"]}}
    given = {
        **settings,
        "partition": {"scheme": "file", "num_clients": 6},
        "tune": {"param_space": axes, "max_concurrent": 1},
    }
    first, second = raysim.tune(given, name="files", quiet=True)
    assert first.summary["params_sha256"] == drawn.summary["params_sha256"] != second.summary["params_sha256"]
    write_rows(tmp_path / "b.csv", rows)
    with pytest.raises(ConfigError, match=r"partition\.file: is changed, but finished trial"):
        raysim.tune(given, name="files", quiet=True)


def test_files_that_differ_in_the_owners_of_test_rows_are_two_partitions(settings, whole, tmp_path):
    rows = [{**row, "client": "0" if row["split"] == "test" else row["client"]} for row in whole]
    files = write_rows(tmp_path / "a.csv", whole), write_rows(tmp_path / "b.csv", rows)

    def read(file):
        (read,) = partitions({**settings, "partition": {"scheme": "file", "file": file, "num_clients": 6}}, "a test")
        return read.manifest

    first, other = map(read, files)
    assert sorted(first.test) == sorted(other.test)
    assert first.checksum != replace(first, test_sizes=other.test_sizes).checksum
    assert json.loads(first.to_json())["test_sizes"] == first.test_sizes.tolist()


def test_a_file_without_a_training_row_or_with_a_client_below_the_minimum_is_refused(settings, whole, tmp_path):
    partition = {"scheme": "file", "num_clients": 6}
    unused = [{**row, "split": "test" if row["split"] == "train" else row["split"]} for row in whole]
    given = {**partition, "file": write_rows(tmp_path / "a.csv", unused)}
    with pytest.raises(ConfigError, match=r"no client has an example to train on in partition .*a\.csv\. Leave some"):
        check({**settings, "partition": given}, "a test")
    given = {**partition, "file": write_rows(tmp_path / "b.csv", whole), "min_samples": 900}
    with pytest.raises(ConfigError, match=r"client \d has \d+ examples, fewer than 900 in partition file"):
        check({**settings, "partition": given}, "a test")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[1, 2]]", "cannot be read"),
        ("[NaN]", "cannot be read"),
        ("3", "cannot be read"),
        ("null", "cannot be read"),
        ('{"0": 3}', "cannot be read .*int"),
        ('{"0": [NaN]}', "cannot be read"),
        ('[{"example": 0.5, "client": 0}]', "cannot be read"),
        ("[" * 100_000, "nested too deeply"),
        ('[{"example": %s, "client": 0}]' % ("9" * 3000), "cannot be read"),
        ('[{"example": 0, "client": 9223372036854775808}]', "cannot be read"),
        ('[{"example": %s, "client": 0}]' % ("9" * 5000), "cannot be read"),
    ],
)
def test_json_that_is_no_partition_is_one_sentence(text, words, root, tmp_path):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        plan_of(root, partition={"scheme": "file", "file": str(tmp_path / "p.json")})
    assert len(str(error.value)) < 1000


def test_a_partition_file_that_is_a_device_or_a_pipe_is_refused_at_once(root, tmp_path):
    pipes = [tmp_path / f"pipe{suffix}" for suffix in (".json", ".csv")]
    for pipe in pipes:
        os.mkfifo(pipe)
    for file in ("/dev/zero", *map(str, pipes)):
        with limited(20), pytest.raises(ConfigError, match=f"a pipe or a device; give a file.*{file}"):
            plan_of(root, partition={"scheme": "file", "file": file})
