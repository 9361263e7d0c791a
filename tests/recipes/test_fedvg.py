"""FedVG's recipes: its released form, its forms of the baselines, and what is beyond the paper."""

from __future__ import annotations

import pytest

from raysim.config import parse_config
from raysim.config.sweep import grid
from raysim.data.arrow import SetInfo
from raysim.plan.build import layout_for, model_spec
from raysim.plan.find import build_methods
from raysim.reporting.published import match, published
from raysim.tuning.plan import read_sweep
from tests.recipes.test_methods import PAPERS, trials
from tests.support.recipe_files import read_recipe

FEDVG_AS_RELEASED = sorted({path.stem for path in (PAPERS / "fedvg").glob("*.yaml")} - {"base", "figure_8"})


@pytest.mark.slow
@pytest.mark.parametrize("name", FEDVG_AS_RELEASED)
def test_fedvg_is_scored_as_released(name):
    seen = 0
    for labels, methods, config in trials("fedvg", name):
        assert config.data.split_within_clients
        assert config.data.validation_set.order == "client"
        (options,) = [m[name] for m in methods for name in ("fedvg", "fedvg_loss") if name in m] or [None]
        is_fedvg = "FedVG" in labels.get("method", "") or bool({"granularity", "score"} & set(labels))
        assert (options is not None) == is_fedvg
        assert options is None or options["as_in"] == "release"
        seen += is_fedvg
    assert seen


def test_scaffold_as_in_fl_bench_takes_five_steps():
    raw = read_recipe(PAPERS / "fedvg" / "table_A3.yaml")
    raw["tune"]["param_space"]["method"] = {"grid_search": ["Scaffold as in FL-bench"]}
    found = {parse_config(trial.raw)[0].local.steps for trial in grid(raw, "table_A3")}
    assert found == {5}
    assert "keep one" in str(parse_config({"local": {"steps": 5, "epochs": 2}})[1])


def test_fedvg_as_released_runs_the_codes_forms():
    """Those that base.yaml names for other recipes, on the code's one partition, under the printed names."""
    path = PAPERS / "fedvg" / "as_released.yaml"
    space = read_recipe(path)["tune"]["param_space"]["method"]["grid_search"]
    named = read_recipe(PAPERS / "fedvg" / "table_A7.yaml")["tune"]["settings"]["method"]
    for name, settings in space.items():
        base, plus, addition = name.partition(" + ")
        assert settings == named.get(f"{base} as in FL-bench{plus}{addition}", named[name]), name
    deviates = {name for name, settings in space.items() if settings != named[name]}
    bases = {"FedAvgM", "Scaffold", "FedDyn", "Elastic"}
    assert deviates == bases | {f"{base} + FedVG" for base in bases}
    seen = set()
    for labels, _, config in trials("fedvg", "as_released"):
        assert config.partition.seed == 42
        assert config.local.steps == (5 if "Scaffold" in labels["method"] else None)
        seen.add(labels["method"])
    assert seen == set(space)


def test_table_A8s_blocks_as_released_are_stages():
    """Methods sheet of FedVG's code: 6 blocks in a ResNet, 14 in a vision transformer; under the printed name."""
    path, counts = PAPERS / "fedvg" / "table_A8.yaml", {}
    command = "granularity=blockwise as released"
    assert command in path.read_text()
    for trial in grid(read_sweep(path, [command, "seed=0", "partition.alpha=0.1"]), "table_A8"):
        labels = {key: value for key, value in trial.raw["labels"].items() if key != "seed"}
        assert match(published("fedvg_table_A8"), {"method": "FedVG", **labels}).setting["granularity"] == "blockwise"
        config, faults = parse_config(trial.raw)
        assert not faults
        (method,), _ = build_methods(config.methods)
        spec = model_spec(config, SetInfo("mine", tuple("1234567"), (224, 224, 3), 0, ""))
        counts[labels["model"]] = len(layout_for(config.model, spec, [method]).blocks)
    assert counts == {"ResNet-18": 6, "ResNet-50": 6, "ViT-S/16": 14, "ViT-B/16": 14}


@pytest.mark.slow
def test_fedvgs_feddyn_counts_participants_by_their_examples():
    """Section 3.2.3: FedDyn uses n_k/N; FedVG's weights take that place."""
    want = {"alpha": 0.1, "max_grad_norm": 10}
    for name in ("table_A3", "table_A4", "table_A7", "figure_6"):
        found = {labels["method"]: methods for labels, methods, _ in trials("fedvg", name)}
        found = {method: methods for method, methods in found.items() if "FedDyn" in method}
        assert found.pop("FedDyn") == [{"feddyn": {**want, "weights": "examples"}}]
        assert all(methods[0] == {"feddyn": want} for methods in found.values())


def test_fedvgs_premise_is_measured_under_its_weights_and_fedavgs():
    premise = {"diagnostics": {"every": 20, "measures": ["premise"]}}
    found = {labels["method"]: methods for labels, methods, _ in trials("fedvg", "premise")}
    assert found == {"FedAvg": [premise], "FedVG": [{"fedvg": {"as_in": "release"}}, premise]}
    assert "premise" in read_recipe(PAPERS / "fedvg" / "premise.yaml")["report"]["figures"]


def test_figure_8_takes_norms_as_released():
    """Rows that are held out before the partition are no client's; of the released form the spectral norm is left."""
    found = {labels["norm"]: options["fedvg"] for labels, (options,), _ in trials("fedvg", "figure_8")}
    assert found["spectral"] == {"norm": "spectral", "one_axis": "l2"}
    assert all("one_axis" not in options for name, options in found.items() if name != "spectral")
