"""LIVAR's options beside each other (table 4) and beside other methods."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from methods.livar import livar
from methods.livar.merging import adapters_of
from raysim.base.errors import ConfigError, MethodError
from raysim.plan.find import build_methods
from tests.methods.livar.test_importance import some_importance
from tests.methods.livar.test_livar import VARIANTS
from tests.support.federations import lora_plan, plan_of, run, server_on
from tests.twins.livar import FEW, LAYERS

CELLS = {
    "neither": {"components": "lora", "layers": "examples"},
    "layers": {"components": "lora"},
    "head": {"layers": "examples"},
    "both": {},
}


def scored(options, layout, updates, importance, variances):
    """layer -> product, and the head, of the model that is scored after a round of these updates (K, num_params)."""
    method, count = livar(**options), len(updates)
    server = SimpleNamespace(
        layout=layout, start=torch.zeros(layout.num_params), num_examples=torch.full((count,), 7),
        is_active=torch.ones(count, dtype=torch.bool), class_counts=torch.full((count, 10), 3), log=lambda *_: None,
        report={"importance": importance, "variance": variances, "variance_all": variances},
        map_updates=lambda f, shared: [f(update, shared) for update in updates],
    )  # fmt: skip
    equal = torch.full((count,), 1 / count, dtype=torch.float64)
    server.weights = method.weigh({leaf.name: equal for leaf in layout.params}, server)
    server.params = torch.zeros(layout.num_params)  # what the weighted sum leads to, as `refuse_other_steps` wants it
    for leaf in layout.params:
        parts = torch.stack([layout.view(update, leaf).double() for update in updates])
        weights = server.weights[leaf.name]
        weights = weights.view(weights.shape + (1,) * (parts.dim() - weights.dim()))
        layout.view(server.params, leaf).copy_((weights * parts).sum(0))
    tensors = method.evaluation_override({}, server)
    found = {p.layer: tensors[p.b.name].double() @ tensors[p.a.name].double() for p in adapters_of(layout)}
    rows = server.weights["head.weight"]
    rows = rows if rows.dim() == 2 else rows[:, None].expand(-1, 10)
    heads = [layout.view(update, "head.weight").double() for update in updates]
    return found | {"head": sum(w[:, None] * h for w, h in zip(rows, heads, strict=True))}


def test_table_4_changes_one_thing_at_a_time(root):
    """Where importances and n_i are equal, and variances too, all four cells score one model."""
    layout = lora_plan(root).layout
    generator = torch.Generator().manual_seed(5)
    updates = torch.randn(3, layout.num_params, generator=generator)
    equal, even = torch.ones(3, 8, 2, dtype=torch.float64), torch.ones(3, 10, dtype=torch.float64)
    cells = {name: scored(options, layout, updates, equal, even) for name, options in CELLS.items()}
    for name, found in cells.items():
        for key, value in cells["both"].items():
            assert (found[key] - value).abs().max() < 1e-6 * value.abs().max(), (name, key)
    unlike = some_importance(3, 8), torch.rand(3, 10, dtype=torch.float64, generator=generator)
    cells = {name: scored(options, layout, updates, *unlike) for name, options in CELLS.items()}
    for name, found in cells.items():
        for key, value in found.items():
            other = "head" if key == "head" else "layers"
            assert torch.equal(value, cells["both" if name in (other, "both") else "neither"][key]), (name, key)
    for key in ("head", LAYERS[0]):
        assert not torch.allclose(cells["both"][key], cells["neither"][key], rtol=1e-2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"components": "head", "table": "paper"}, ["table: has no effect with components head"]),
        (
            {"components": "head", "layers": "examples", "evaluate": "code"},
            ["layers: has no effect", "evaluate: has no effect"],
        ),
        ({"components": "lora", "variance": "released"}, ["variance: has no effect with components lora"]),
        ({"layers": "examples", "table": "paper"}, ["table: has no effect with layers examples"]),
    ],
)
def test_options_without_effect_are_refused(options, words):
    faults = build_methods([{"livar": options}])[1]
    assert [word in str(fault) for word, fault in zip(words, faults, strict=True)] == [True] * len(words)


@pytest.mark.parametrize("options", [*VARIANTS.values(), *CELLS.values()])
def test_options_with_effect_are_not_refused(options):
    assert build_methods([{"livar": options}])[1] == []


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        ("ccvr", {"batch_size": 64}, "ccvr.batch_size: has no effect with as_in fed-mammoth"),
        ("regmean", {"shrink": 0.1}, "regmean.shrink: has"),
        ("fisher", {"num_examples": 8}, "fisher.num_examples: has"),
    ],
)
def test_options_beside_as_in_are_refused(make, options, words):
    (fault,) = build_methods([{make: {"as_in": "fed-mammoth", **options}}])[1]
    assert words in str(fault)


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (["livar", "fedvg"], "livar and fedvg both decide weights:"),
        (["livar", "uniform"], "livar and uniform both decide weights:"),
        (["livar", "fisher"], "livar and fisher both decide merge"),
        (["livar", "fedavgm"], "livar and fedavgm both decide server-optimizer"),
        ([{"livar": {"layers": "examples"}}, "fedvg"], "livar and fedvg both decide weights:"),
        (["livar", {"livar": {"components": "head"}}], "livar is listed twice"),
        (["livar", "ccvr"], "ccvr cannot be combined with livar because of its `is_phase`: .* evaluate: factors"),
    ],
)
def test_what_cannot_run_with_livar_is_refused(methods, words, root):
    with pytest.raises(ConfigError, match=words):
        lora_plan(root, methods)


@pytest.mark.parametrize(
    "methods",
    [
        [{"livar": {"evaluate": "factors"}}, "ccvr"],
        [{"livar": {"evaluate": "factors"}}, "feddyn"],
        ["livar", {"ccvr": {"as_in": "fed-mammoth"}}],
        ["livar", "fedprox"],
        [{"livar": {"evaluate": "factors"}}, "fedavgm"],
        [{"livar": {"components": "head"}}, "fedavgm"],
    ],
)
def test_what_runs_with_livar(methods, root):
    lora_plan(root, methods)


def test_products_are_weighed_by_shares_alone(root):
    plan = lora_plan(root, ["livar", "norm_bounding"], cohort={"size": 3})
    with pytest.raises(MethodError, match=r"do not sum to one, and the products of eq\. 3 are weighed by shares"):
        run(plan, root, rounds=1)


@pytest.mark.parametrize("other", ["feddyn", "elastic"])
def test_a_step_at_the_server_that_the_products_do_not_see_ends_the_run(other, root):
    with pytest.raises(MethodError, match=r"another method moved .*lora_A.* at the server"):
        run(lora_plan(root, ["livar", other], cohort={"size": 3}), root, rounds=2)
    run(lora_plan(root, [{"livar": {"evaluate": "factors"}}, other], cohort={"size": 3}), root, rounds=2)


@pytest.mark.parametrize("codec", ["top_k", "random_k", "qsgd"])
def test_importances_are_those_of_the_steps_whatever_is_sent(codec, root):
    alone, encoded = (server_on(lora_plan(root, m), root).run_round(0).arrays for m in (["livar"], ["livar", codec]))
    for name in ("livar.importance_a", "livar.importance_b"):
        assert (alone[name] == encoded[name]).all()


@pytest.mark.parametrize(("options", "scalars"), [({}, 2 * 8 + 2 * 10), ({"variance": "released"}, 2 * 8 + 10)])
def test_adapters_head_and_a_few_scalars_travel(options, scalars, root):
    """Up: 4 bytes for each number of adapters and head, 8 for I_A and I_B of 8 layers and variances of 10 classes."""
    size = 2 * 4 * ((16 + 48) + (16 + 16) + (16 + 64) + (64 + 16)) + 10 * 16 + 10
    plan = lora_plan(root, [{"livar": options}], cohort={"size": 5}, data=FEW)
    metrics = server_on(plan, root).run_round(0).metrics
    assert metrics["comm/up_mb"] == pytest.approx(5 * (4 * size + 8 * scalars) / 1e6, rel=1e-12)
    assert metrics["comm/down_mb"] == pytest.approx(5 * 4 * size / 1e6, rel=1e-12)


def test_livar_needs_adapters_and_its_halves_claim_only_their_part(root):
    with pytest.raises(ConfigError, match=r"livar needs lora: set model\.lora"):
        plan_of(root, ["livar"])
    plan_of(root, [{"livar": {"components": "head"}}])
    with pytest.raises(ConfigError, match=r"livar needs lora"):
        plan_of(root, [{"livar": {"components": "head", "variance": "released"}}])
    assert livar(components="head").claims == {"weights:@head.*"}
    assert livar(components="lora", evaluate="factors").claims == {"weights:*.lora_[AB].*"}
    with pytest.raises(ConfigError, match="livar claims weights:head"):
        lora_plan(root, ["livar", {"tests.support.toys:personal_head": {"head": "head"}}])
