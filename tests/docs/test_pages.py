"""What the documentation shows works: commands, configurations, Python, links."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from methods import METHODS
from raysim.base.errors import ConfigError
from raysim.cli.main import app
from raysim.config import parse_config, parse_overrides, read_config
from raysim.config.schema import Config
from raysim.core.hooks import CALLS
from raysim.launch import settings_of
from raysim.plan.find import build_methods
from raysim.reporting.measure import DEFAULT
from raysim.reporting.published import WORDS
from raysim.tuning.plan import read_sweep
from tests.docs.pages import PAGES, ROOT, blocks, commands, name_of, write_files

every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
VERBS = get_command(app)


@pytest.fixture
def at_page(page, tmp_path, monkeypatch):
    """A folder with the files that the page shows, and with those of the clone; it is the current one."""
    for name in ("configs", "cluster", "methods"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("RAYSIM_HOME", raising=False)
    yield tmp_path
    for block in blocks(page, "python"):
        if block.file:
            sys.modules.pop(block.file.removesuffix(".py"), None)


@every_page
@pytest.mark.usefixtures("at_page")
def test_commands_are_accepted(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for where, (program, *words) in commands(page):
        if program == "make":
            assert set(words) <= {*targets, "test-minima", "test-newest"}, where
        elif words and words[0].startswith("-"):
            assert any(words[0] in option.opts for option in VERBS.params), where
        elif words:
            assert words[0] in VERBS.commands, f"{where}: {words}"
            verb = VERBS.commands[words[0]]
            given = verb.make_context(words[0], words[1:]).params  # raises what the command line does not take
            if "overrides" in given:
                check_configuration(given, words[0], where)


def check_configuration(given, verb, where):
    """The settings of a command are those of a configuration; of a file that only the reader has, none are known."""
    config, overrides = given["config"], given["overrides"] or []
    is_there = ":" in config or Path(config).is_file()
    if verb in ("tune", "partition"):
        raw = read_sweep(Path(config) if is_there else None, overrides)
    else:
        values = parse_overrides(overrides)
        raw, _ = settings_of(config if is_there else None, values, {}, scale=is_there and given["is_scaled"])
    check_raw(raw, where)


def check_raw(raw, where):
    config, faults = parse_config(raw)
    assert not faults, f"{where}: {faults}"
    _, faults = build_methods(config.methods)
    assert not faults, f"{where}: {faults}"


@every_page
@pytest.mark.usefixtures("at_page")
def test_configurations_are_accepted(page, tmp_path):
    for block in blocks(page, "yaml"):
        if "# not run:" in block.text or yaml.safe_load(block.text) is None:
            continue
        unknown = set(yaml.safe_load(block.text)) - {*Config.model_fields, "base"}
        assert not unknown, f"{block.where}: {unknown} are not keys of a configuration"
        (tmp_path / "block.yaml").write_text(block.text)
        try:
            raw = read_config(tmp_path / "block.yaml")
        except ConfigError as error:
            pytest.fail(f"{block.where}: {error}")
        known = [spec for spec in raw.get("methods", []) if is_at_hand(spec)]
        check_raw({**raw, "methods": known}, block.where)


def is_at_hand(spec):
    """Whether a method is raysim's, or shown as a file on the page."""
    name = next(iter(spec)) if isinstance(spec, dict) else spec
    module = name.partition(":")[0]
    return module == name or Path(f"{module}.py").is_file()


@every_page
def test_python_compiles(page):
    for block in blocks(page, "python"):
        compile("\n" * block.line + block.text, page, "exec")


def pages_with_python():
    """The pages with Python that runs; test_own_method.py runs all of its page."""
    pages = [page for page in PAGES if page.name != "own_method.md"]
    return [page for page in pages if any(block.runs for block in blocks(page))]


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with_python(), ids=name_of)
@pytest.mark.usefixtures("ray_cluster", "at_page")
def test_python_runs(page):
    names: dict[str, object] = {}
    for block in blocks(page):
        if block.runs:
            exec(compile("\n" * block.line + block.text, page, "exec"), names)


def runs_here(words, page):
    """Whether a command runs, without Ray, a configuration that the page shows whole."""
    files = [block for block in blocks(page, "yaml") if block.file and block.file in words]
    return words[:2] == ["raysim", "run"] and any("backend: serial" in block.text for block in files)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(runs_here(words, page) for _, words in commands(page))], ids=name_of
)
def test_commands_with_whole_examples_run(page, at_page):
    for where, words in commands(page):
        if runs_here(words, page):
            ended = CliRunner().invoke(app, words[1:])
            assert ended.exit_code == 0, f"{where}: {ended.output} {ended.exception!r}"
    assert list((at_page / "runs").glob("*/COMPLETED"))


LINK = re.compile(r"```.*?```|`[^`\n]*`|\]\((?P<target>[^)\s#:]+)(?:#[^)\s]*)?\)", re.DOTALL)


@every_page
def test_links_lead_to_files(page):
    targets = [match["target"] for match in LINK.finditer(page.read_text()) if match["target"]]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_first_page_of_the_site_is_the_readme_with_its_picture_and_links(hooks):
    assert hooks.OUTSIDE["README.md"] == "index.md" in (ROOT / "mkdocs.yml").read_text()
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    config = SimpleNamespace(repo_url=None)
    text = hooks.on_page_markdown((ROOT / "README.md").read_text(), page, config, None)
    assert "shard files](pictures/round.svg)" in text
    assert "make demo " in text
    assert "raysim.run(" in text
    targets = {match["target"] for match in LINK.finditer(text) if match["target"] and ":" not in match["target"]}
    assert {"start.md", "cluster.md", "contributing.md", "notebooks/first_run.md"} <= targets
    sources = {uri: place for place, uri in hooks.OUTSIDE.items()}
    for target in targets:
        place = ROOT / sources[target] if target in sources else ROOT / "docs" / target
        assert place.exists() or place.with_suffix(".ipynb").exists(), target


def test_the_table_of_what_fits_names_hooks_that_its_methods_have():
    text = (ROOT / "docs" / "beyond_hooks.md").read_text().split("## What fits")[1].split("##")[0]
    rows = [line.split("|")[2:4] for line in text.splitlines() if line.startswith("|") and "`" in line]
    assert len(rows) > 10
    for hooks, examples in rows:
        named = [hook for hook in re.findall(r"`(\w+)`", hooks) if hook in CALLS]
        for example in re.findall(r"`(\w+)`", examples):
            made = METHODS[example]()
            assert [hook for hook in named if getattr(made, hook) is not None], (example, named)
    places = re.findall(r"`((?:raysim|methods)/[\w/]+\.py)`", (ROOT / "docs" / "beyond_hooks.md").read_text())
    assert all((ROOT / place).is_file() for place in places)


def test_every_key_has_a_meaning_and_the_page_of_keys_is_of_this_schema(hooks):
    page = hooks.keys_page()
    assert page == hooks.KEYS.read_text(), "make docs writes it anew"
    assert not re.findall(r"^\| `\w+` .*\|  \|$", page, re.MULTILINE)


def test_the_page_of_reports_names_the_metric_that_a_report_shows_unless_told_otherwise():
    (line,) = [
        line for line in (ROOT / "docs" / "reports.md").read_text().splitlines() if line.startswith("| `--metric")
    ]
    assert f"default: `tune.metric` of a sweep, otherwise the {WORDS[DEFAULT]};" in line
