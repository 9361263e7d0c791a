"""Tables: what becomes of columns, targets, splits and missing values, by hand; what cannot be used is one sentence."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from sklearn import datasets
from typer.testing import CliRunner

import raysim
from raysim.base.errors import DataError
from raysim.cli.main import app
from raysim.data import sources
from raysim.data.arrow import PreparedSet
from raysim.data.facts import FACTS
from raysim.data.readers.reader_options import ReaderOptions
from raysim.data.sources import prepare, set_path
from raysim.plan.check import check
from tests.support.image_sets import prepared

PEOPLE = """age,job,town,member,score,income
39,clerk,Ulm,True,1.5,low
50,boss,Bonn,False,2.5,high
30,clerk,Ulm,True,-3.5,low
"""


@pytest.fixture
def table(tmp_path):
    """table(text, name) writes a file below a folder; table() is the folder."""
    folder = tmp_path / "files"
    folder.mkdir()

    def write(text=None, name="people.csv"):
        if text is not None:
            (folder / name).write_text(text)
        return folder if text is None else folder / name

    return write


def read(files, out, **options):
    """(the prepared set, inputs, targets) of a table."""
    return prepared("table", files, out, options=ReaderOptions(**options))


def test_numbers_stay_and_words_become_a_column_each(table, tmp_path):
    source, inputs, targets = read(table(PEOPLE), tmp_path, target="income", domains="town")
    assert source.info.columns == ("age", "job_boss", "job_clerk", "member", "score")
    np.testing.assert_array_equal(inputs, [[39, 0, 1, 1, 1.5], [50, 1, 0, 0, 2.5], [30, 0, 1, 1, -3.5]])
    assert (source.info.task, source.info.classes, source.info.domains) == ("classes", ("high", "low"), ("Bonn", "Ulm"))
    assert (inputs.dtype, targets.tolist(), source.domains.tolist()) == (np.float32, [1, 0, 1], [1, 0, 1])
    np.testing.assert_allclose(source.info.mean, inputs.mean(0, dtype=np.float64))
    assert source.splits is None


def test_whole_numbers_with_a_fraction_of_zero_are_classes(table, tmp_path):
    """As pandas writes whole numbers of a column with a gap."""
    source, inputs, targets = read(table("a,y\n1,0.0\n2,2.0\n3,1.0\n4,\n"), tmp_path, target="y", missing="drop")
    assert (source.info.task, source.info.classes, targets.tolist()) == ("classes", ("0", "1", "2"), [0, 2, 1])
    assert (source.info.columns, len(inputs)) == (("a",), 3)


def test_codes_number_the_sorted_words(table, tmp_path):
    source, inputs, _ = read(table(PEOPLE), tmp_path, target="income", codes=True)
    assert source.info.columns == ("age", "job", "town", "member", "score")
    np.testing.assert_array_equal(inputs[:, 1:3], [[1, 1], [0, 0], [1, 1]])


def test_a_column_whose_name_is_a_number_is_found(table, tmp_path):
    words = ["prepare", "table", "--root", str(table("a,007,y\n1,x,0\n2,z,1\n")), "--target", "y", "--domains", "007"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert PreparedSet(set_path(tmp_path, "table")).info.domains == ("x", "z")


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
@pytest.mark.parametrize(
    ("target", "asked", "task", "names", "values", "kind"),
    [
        ("word", None, "classes", ("no", "yes"), [1, 0, 1], "int64"),
        ("flag", None, "classes", ("False", "True"), [1, 0, 1], "int64"),
        ("few", None, "classes", ("3", "12"), [1, 0, 1], "int64"),
        ("few", "regression", "regression", ("few",), [12, 3, 12], "float32"),
        ("real", None, "regression", ("real",), [0.5, 1.5, 2.0], "float32"),
        ("whole", "classes", "classes", ("1", "2"), [0, 1, 0], "int64"),
        ("flag,bit", None, "labels", ("flag", "bit"), [[1, 0], [0, 0], [1, 1]], "uint8"),
        ("bit", "labels", "labels", ("bit",), [[0], [0], [1]], "uint8"),
        ("whole,few", None, "regression", ("whole", "few"), [[1, 12], [2, 3], [1, 12]], "float32"),
        ("real, few", None, "regression", ("real", "few"), [[0.5, 12], [1.5, 3], [2, 12]], "float32"),
        ("flag,bit", "regression", "regression", ("flag", "bit"), [[1, 0], [0, 0], [1, 1]], "float32"),
    ],
)
def test_the_target_says_the_task_and_an_option_decides(target, asked, task, names, values, kind, ending, tmp_path):
    frame = pd.DataFrame({"x": [1.0, 2.0, 3.0], "word": ["yes", "no", "yes"], "flag": [True, False, True]})
    frame = frame.assign(bit=[0, 0, 1], few=[12, 3, 12], real=[0.5, 1.5, 2.0], whole=[1.0, 2.0, 1.0])
    path = tmp_path / f"a{ending}"
    frame.to_csv(path, index=False) if ending == ".csv" else frame.to_parquet(path)
    source, _, targets = read(path, tmp_path, target=target, task=asked)
    assert (source.info.task, source.info.classes, source.info.target_type) == (task, names, kind)
    np.testing.assert_array_equal(targets, values)


def test_a_missing_value_is_named_left_out_or_filled_in(table, tmp_path):
    path = table("age,job,y\n10,clerk,1\n,clerk,0\n40,,1\n10,boss,0\n")
    with pytest.raises(DataError, match=r"a missing value in .*people\.csv, column 'age', row 2\. Give --missing drop"):
        read(path, tmp_path, target="y")
    source, inputs, targets = read(path, tmp_path, target="y", missing="drop")
    np.testing.assert_array_equal(inputs, [[10, 0, 1], [10, 1, 0]])
    assert (targets.tolist(), source.info.left_out) == ([1, 0], "2 of 4 rows, with a missing value")
    _, inputs, _ = read(path, tmp_path, target="y", missing="mean")
    np.testing.assert_array_equal(inputs, [[10, 0, 1], [20, 0, 1], [40, 0, 1], [10, 1, 0]])
    path = table("age,job,y\n10,clerk,1\n20,clerk,\n30,boss,0\n")
    with pytest.raises(DataError, match=r"column 'y', row 2\. Give --missing-target drop, which removes the rows$"):
        read(path, tmp_path, target="y", missing="mean")
    source, inputs, targets = read(path, tmp_path, target="y", missing="drop")
    assert (source.info.classes, targets.tolist()) == (
        ("0", "1"),
        [1, 0],
    )  # not 0.0 and 1.0, as pandas has them beside NaN


COSTS = """id,visit,region,age,smoker,costs
1,3.2.1970,north,34,yes,16884.5
2,15.02.1970,south,,no,1725.5
3,28.01.1970,north,41,,4449.5
4,01.01.1970,west,55,no,
"""


def test_each_column_is_read_as_asked_and_told(table, tmp_path):
    """Columns dropped, dates in days, medians and missing words for inputs, and no row without a target."""
    asked = {"drop": "id", "dates": "dmy", "missing": "word", "missing_target": "drop", "domains": "region"}
    source, inputs, targets = read(table(COSTS), tmp_path, target="costs", **asked)
    assert source.info.columns == ("visit", "age", "smoker_missing", "smoker_no", "smoker_yes")
    np.testing.assert_array_equal(inputs, [[33, 34, 0, 0, 1], [45, 37.5, 0, 1, 0], [27, 41, 1, 0, 0]])
    np.testing.assert_array_equal(targets, np.float32([16884.5, 1725.5, 4449.5]))
    assert source.info.reading == (
        "dates, in days: visit; numbers: age; words, one-hot: smoker (3); target: costs (regression); domains: region (2); "
        "dropped: id"
    )
    assert source.info.left_out == "1 of 4 rows, with a missing target or domain"
    _, inputs, _ = read(table(COSTS), tmp_path, target="costs", **asked | {"missing": "mean", "missing_target": "drop"})
    np.testing.assert_array_equal(
        inputs[:, 2:], [[0, 1], [1, 0], [1, 0]]
    )  # the most frequent word, of two the first one


def test_a_data_frame_is_read_as_its_file(table, tmp_path):
    asked = {"missing": "median", "missing_target": "drop", "dates": "dmy", "domains": "region"}
    source, _, _ = read(table(COSTS), tmp_path, target="costs", drop="id", **asked)
    frame = pd.read_csv(table(COSTS))
    found = raysim.table(frame, name="mine", target="costs", drop=["id"], root=tmp_path / "mine", **asked)
    assert (found.checksum, found.reading) == (source.info.checksum, source.info.reading)
    frame["visit"] = pd.to_datetime(frame["visit"], dayfirst=True, format="%d.%m.%Y")
    shuffled = frame.set_index(frame.index[::-1])  # an index is not read
    found = raysim.table(shuffled, name="mine", target="costs", drop=["id"], root=tmp_path / "mine", **asked)
    assert found.checksum == source.info.checksum
    with pytest.raises(DataError, match=r"a missing value in the frame, column 'age', row 2"):
        raysim.table(frame, name="mine", target="costs", root=tmp_path / "mine")


def test_train_and_test_files_are_the_official_split_and_training_rows_are_fitted(table, tmp_path):
    table("age,job,y\n50,chef,a\n,boss,b\n,clerk,a\n", "test.csv")
    table("age,job,y\n10,clerk,a\n20,clerk,b\n,boss,b\n", "train.csv")
    source, inputs, targets = read(table(), tmp_path, target="y", missing="mean")
    assert source.splits.tolist() == [0, 0, 0, 2, 2, 2]
    # The mean of 10 and 20; no column for the chef, whom only the test rows have.
    assert source.info.columns == ("age", "job_boss", "job_clerk")
    expected = [[10, 0, 1], [20, 0, 1], [15, 1, 0], [50, 0, 0], [15, 1, 0], [15, 0, 1]]
    np.testing.assert_array_equal(inputs, expected)
    assert targets.tolist() == [0, 1, 1, 0, 1, 0]
    _, inputs, _ = read(table(), tmp_path, target="y", missing="drop", codes=True)
    np.testing.assert_array_equal(inputs, [[10, 0], [20, 0], [50, -1]])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("train.csv", "age,job,y\n10,clerk,a\n20,clerk,b\n", r"a missing value in .*test\.csv, column 'age', row 2"),
        (
            "train.csv",
            "age,job,y,town\n10,clerk,a,Ulm\n",
            r"the column 'town' is in one of train\.csv and test\.csv alone",
        ),
        ("more.csv", "age,job,y\n10,clerk,a\n", r"2 tables, among them more\.csv"),
        ("validation.csv", "age,job,y\n10,clerk,a\n20,clerk,b\n", "no training row .*train.csv"),
    ],
)
def test_files_that_do_not_fit_each_other_are_refused(name, text, words, table, tmp_path):
    table("age,job,y\n50,chef,a\n,boss,b\n,clerk,a\n", "test.csv")
    table(text, name)
    with pytest.raises(DataError, match=words):
        read(table(), tmp_path, target="y", missing="drop" if name == "validation.csv" else None)


def test_a_stray_word_of_the_test_rows_makes_no_words_of_numbers(table, tmp_path):
    table("a,y\n" + "".join(f"{i},{i % 2}\n" for i in range(30)), "train.csv")
    table("a,y\n1,0\n?,1\n", "test.csv")
    with pytest.raises(DataError, match=r"the word '\?' in a column of numbers .*test\.csv"):
        read(table(), tmp_path, target="y")


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_other_delimiters_are_seen_in_the_header(delimiter, table, tmp_path):
    _, inputs, _ = read(table(PEOPLE.replace(",", delimiter)), tmp_path, target="income")
    assert inputs.shape == (3, 7)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (PEOPLE, {}, r"a table needs a target in .*--target COLUMN"),
        (PEOPLE, {"target": "incme"}, r"no column 'incme' in .*people\.csv\. Did you mean 'income'\?"),
        (PEOPLE, {"target": "income", "domains": "twon"}, "no column 'twon' .*Did you mean 'town'"),
        (PEOPLE, {"target": "income", "domains": "income"}, "the column 'income' is named twice"),
        (PEOPLE.split("\n", 1)[1], {"target": "income"}, r"no column 'income', and the first line holds 39 .*a header"),
        ("", {"target": "y"}, r"an empty file in .*people\.csv"),
        ("a,y\n", {"target": "y"}, "no row below the header"),
        ("a,y\n1,2\n3,4,5\n", {"target": "y"}, r"not a readable table .*people\.csv"),
        (",a,y\n0,1,2\n", {"target": "y"}, r"column 1 has no name .*index=False"),
        ("y\n1\n0\n", {"target": "y"}, "no column is left for the inputs"),
        ("a,y\n1,0\ninf,1\n", {"target": "y"}, r"inf, no number that float32 holds, in .*column 'a', row 2\. Correct the cell"),
        ("a,y\n1,0\n-1e39,1\n", {"target": "y"}, "-1e[+]39, no number that float32 holds"),
        ("a,y\n1,0.5\n2,inf\n", {"target": "y"}, r"inf, no number .*column 'y', row 2"),
        ("a,y\n1,0\n2,0\n", {"target": "y"}, "every row has the class '0'"),
        (PEOPLE, {"target": "income", "task": "regression"}, r"the word 'low' for the task regression in .*'income', row 1"),
        (PEOPLE, {"target": "income", "task": "labels"}, "the word 'low' for the task labels"),
        (PEOPLE, {"target": "score", "task": "classes"}, r"1\.5 is not a class in .*column 'score', row 1.*--task regression"),
        (PEOPLE, {"target": "age", "task": "labels"}, r"the label 39 in .*row 1\. Give 0 or 1"),
        (PEOPLE, {"target": "age,score,job", "task": "classes"}, "3 targets, and a row has one class"),
        (PEOPLE, {"target": "age,job"}, "several targets, including words"),
        (
            "a,y\n" + "".join(f"{i},{i % 21}\n" for i in range(42)),
            {"target": "y"},
            r"21 different whole numbers, classes or regression.*Give --task classes or --task regression",
        ),
        (
            "a,y\n" + "".join(f"{i},0\n" for i in range(30)) + "?,1\n",
            {"target": "y"},
            r"the word '\?' in a column of numbers.*row 31",
        ),
        ("a,y\n" + "".join(f"w{i}x,{i % 2}\n" for i in range(1001)), {"target": "y"}, "1,001 different words .*--codes"),
        ("a;y\n1,5;0\n2,25;1\n", {"target": "y"}, r"'1,5' is a number with a comma.*decimal points"),
        ("a,y,y\n1,0,0\n2,1,1\n", {"target": "y"}, "the column 'y' appears twice in the header"),
        ("a,a,y\n1,0,0\n2,1,1\n", {"target": "y"}, "the column 'a' appears twice"),
        ("a,y , y\n1,0,0\n2,1,1\n", {"target": "y"}, "the column 'y' appears twice"),
        ('a,y\n"1,5",0\n2,1\n', {"target": "y"}, r"'1,5' is a number with a comma.*column 'a', row 1"),
        ('a,y\n3,0\n"1,234,567",1\n', {"target": "y"}, r"'1,234,567' is a number with a comma.*row 2"),
        ("a,y\n3,0\n1.234.567,1\n", {"target": "y"}, r"'1.234.567' is a number with .* several points.*row 2"),
        ("a,y\n3,0\n+5%,1\n", {"target": "y"}, r"'\+5%' is a percentage.*row 2"),
        ("a,y\n3,0\n12.5%,1\n", {"target": "y"}, r"'12.5%' is a percentage.*row 2\. Write the number"),
        ("a,y\n2024-01-31,0\n2024-02-01,1\n", {"target": "y"}, r"'2024-01-31' is a date.*Give --dates ymd, dmy or mdy"),
        ("a,b,y\n31.1.2024,1,0\n1.2.2024,2,1\n", {"target": "y", "dates": "mdy"}, r"'31.1.2024' is not a date in the order mdy"),
        ("a,b,y\n1.2.24,1,0\n1.2.2024,2,1\n", {"target": "y", "dates": "dmy"}, r"'1.2.24' is not a date in the order dmy"),
        ("a,b,y\n1.2.2024,1,0\nsoon,2,1\n", {"target": "y", "dates": "dmy"}, r"'soon' is not a date in the order dmy.*row 2"),
        ("a,b,y\n1,1,0\n2,2,1\n", {"target": "y", "drop": "c"}, "no column 'c'"),
        ("a,y\n1,0\n2,1\n", {"target": "y", "drop": "a"}, "no column is left for the inputs"),
        ("a,y\n1,0\n2,1\n", {"target": "y", "drop": "y"}, "the column 'y' is named twice"),
        ("a,y\nx,0\n31.1.2024,1\n", {"target": "y"}, r"'31.1.2024' is a date.*row 2"),
        ("a,y\nyes,0\nno,1\nyes ,1\n", {"target": "y"}, r"the word 'yes ' differs by blanks from another.*row 3"),
        ("a,y,d\n1,0,Ulm\n2,1,Bonn\n3,0,Ulm \n", {"target": "y", "domains": "d"}, r"the word 'Ulm ' differs by blanks"),
        ("a,y\n1,yes\n2,no\n3,yes \n", {"target": "y"}, r"the word 'yes ' differs by blanks.*column 'y', row 3"),
        ("a;y\n1;0,5\n2;1,5\n", {"target": "y"}, r"'0,5' is a number with a comma"),
        ("a,y\n,0\n,1\n", {"target": "y", "missing": "mean"}, "no value in the training rows of column 'a'"),
        ("a,y\n,0\n,1\n", {"target": "y", "missing": "drop"}, "a missing value in every row"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_used_is_one_sentence(text, options, words, table, tmp_path):
    with pytest.raises(DataError, match=words):
        read(table(text), tmp_path, **options)
    assert not set_path(tmp_path, "table").exists()


def test_bytes_that_are_no_text_and_dates_are_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"a,y\n\xff,1\n")
    with pytest.raises(DataError, match=r"not a readable table .*UTF-8 text with a header"):
        read(tmp_path / "a.csv", tmp_path, target="y")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="not a readable table"):
        read(tmp_path / "a.parquet", tmp_path, target="y")
    pd.DataFrame({"when": pd.to_datetime(["2020", "2021"]), "y": [0, 1]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a column 'when' of type datetime64.*Give numbers or words"):
        read(tmp_path / "a.parquet", tmp_path, target="y")


def test_the_command_says_inputs_and_keeps_no_set_of_other_options(table, tmp_path):
    words = ["prepare", "table", "--root", str(table(PEOPLE)), "--as", "people", "--out", str(tmp_path / "out")]

    def said(*more):
        result = CliRunner().invoke(app, [*words, *more])
        return " ".join((result.output + str(result.exception or "")).split())

    text = said("--target", "income", "--domains", "town")
    assert "people: 3 inputs (5,), 2 classes, 2 domains, sha256" in text
    assert f"data: {{name: people, root: {tmp_path / 'out'}, normalise: standard}}" in text
    assert (
        "columns: numbers: age, member, score; words, one-hot: job (2); target: income (classes); domains: town (2)"
        in text
    )
    assert "people: 3 inputs" in said("--target", "income", "--domains", "town")
    assert "the set exists with --target income --domains town, and --target score is asked for" in said(
        "--target", "score"
    )
    text = said("--target", "score", "--again")
    assert "people: 3 inputs (8,), regression of score, sha256" in text
    assert "adult has no option --target" in str(
        CliRunner().invoke(app, ["prepare", "adult", "--target", "a"]).exception
    )


def rows_of(count):
    """CSV rows: a number, a town, a class."""
    return "".join(f"{i}.5,{'Ulm' if i % 3 else 'Bonn'},{'yes' if i % 2 else 'no'}\n" for i in range(count))


@pytest.mark.parametrize(
    ("data", "sizes", "in_test"),
    [
        ({"validation": 0.2}, (24, 6, 12), True),  # official: the default of a set with test rows
        ({"split": "official"}, (30, 0, 12), True),
        ({"split": "fraction", "test": 0.5, "validation": 0.25}, (11, 10, 21), False),
    ],
)
def test_runs_split_a_table_as_they_split_images(data, sizes, in_test, table, tmp_path):
    table("x,town,y\n" + rows_of(30), "train.csv")
    table("x,town,y\n" + rows_of(12), "test.csv")
    read(table(), tmp_path, target="y", domains="town")
    groups = {"partition": {"scheme": "natural", "num_clients": 2}, "cohort": {"size": 2}, "model": {"name": "mlp"}}
    plan = check(
        {"data": {"root": str(tmp_path), "name": "table", **data}, "resources": {"backend": "serial"}, **groups}, ""
    )
    manifest = plan.manifest
    assert (int(manifest.sizes.sum()), len(manifest.validation), len(manifest.test)) == sizes
    assert (np.sort(manifest.test).tolist() == list(range(30, 42))) == in_test
    domains = PreparedSet(set_path(tmp_path, "table")).domains
    assert [set(domains[rows]) for rows in manifest.clients] == [{0}, {1}]


# --- published tables -------------------------------------------------------------------------------------------------

ADULT = """39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, Cuba, <=50K
54, ?, 180211, Some-college, 10, Married-civ-spouse, ?, Husband, Asian-Pac-Islander, Male, 0, 0, 60, South, >50K
"""


@pytest.mark.parametrize("names", [("adult.data", "adult.test"), ("adult-train.csv", "adult-test.csv")])
def test_adult_is_read_as_published(names, tmp_path, monkeypatch):
    train, test = (tmp_path / name for name in names)
    train.write_text(ADULT + "\n")
    first = "|1x3 Cross validator\n" if names[1] == "adult.test" else ""
    test.write_text(first + ADULT.splitlines()[0].replace("State-gov", "Private") + ".\n")
    source, inputs, targets = prepared("adult", tmp_path, tmp_path / "out")
    info = source.info
    assert (info.task, info.classes, info.domains) == ("classes", ("<=50K", ">50K"), ("?", "Adm-clerical"))
    assert (targets.tolist(), source.domains.tolist(), source.splits.tolist()) == ([0, 1, 0], [1, 0, 1], [0, 0, 2])
    assert info.columns[:4] == ("age", "workclass_?", "workclass_State-gov", "fnlwgt")
    np.testing.assert_array_equal(inputs[:, :4], [[39, 0, 1, 77516], [54, 1, 0, 180211], [39, 0, 0, 77516]])
    assert sum(name.startswith("occupation_") for name in info.columns) == 2  # an input as well as the domain
    monkeypatch.setattr(sources, "FACTS", FACTS)
    with pytest.raises(
        DataError, match=r"not the published adult: 2 train, 1 test examples; 32,561 train, 16,281 test"
    ):
        prepare("adult", tmp_path / "other", tmp_path)
    test.unlink()
    with pytest.raises(DataError, match=r"missing file adult\.test in .*UCI"):
        prepare("adult", tmp_path / "other", tmp_path)


@pytest.mark.parametrize(("delimiter", "has_header"), [(",", False), (";", True)])
def test_wine_quality_has_its_colours_as_domains(delimiter, has_header, tmp_path):
    row = "7.4,0.7,0,1.9,0.076,11,34,0.9978,3.51,0.56,9.4,5\n"
    header = '"fixed acidity";"volatile acidity"' + ';"x"' * 9 + ';"quality"\n' if has_header else ""
    for name, rows in (("red", row + row.replace("7.4", "8")), ("white", row.replace(",5\n", ",7\n"))):
        (tmp_path / f"winequality-{name}.csv").write_text(header + rows.replace(",", delimiter))
    source, inputs, targets = prepared("wine_quality", tmp_path, tmp_path / "out")
    info = source.info
    assert (info.task, info.classes, info.domains) == ("regression", ("quality",), ("red", "white"))
    assert (targets.tolist(), source.domains.tolist()) == ([5, 5, 7], [0, 0, 1])
    np.testing.assert_array_equal(inputs[1], np.float32([8, 0.7, 0, 1.9, 0.076, 11, 34, 0.9978, 3.51, 0.56, 9.4]))
    assert info.columns[::5] == ("fixed acidity", "free sulfur dioxide", "alcohol")


@pytest.mark.parametrize(
    ("name", "task", "outputs"),
    [
        ("diabetes", "regression", ("progression",)),
        ("breast_cancer", "classes", ("malignant", "benign")),
        ("wine", "classes", ("class_0", "class_1", "class_2")),
    ],
)
def test_bundled_tables_are_scikit_learns_as_measured(name, task, outputs, tmp_path):
    prepare(name, tmp_path)
    source = PreparedSet(set_path(tmp_path, name))
    inputs, targets = source.whole()
    scaled = {"scaled": False} if name == "diabetes" else {}
    expected, numbers = getattr(datasets, f"load_{name}")(return_X_y=True, **scaled)
    np.testing.assert_array_equal(inputs, expected.astype(np.float32))
    np.testing.assert_array_equal(targets, numbers)
    assert (source.info.task, source.info.classes) == (task, outputs)
    assert len(source.info.columns) == expected.shape[1]
