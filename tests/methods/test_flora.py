"""FLoRA against modules that really merge into their frozen weights, its property checks and what it refuses."""

from __future__ import annotations

import pytest
import torch

from methods.flora import nearest_factors
from raysim.base.errors import ConfigError
from raysim.engine.cohort import Cohort
from raysim.engine.messages import unpack
from raysim.models import build_model
from raysim.models.modules import trained_tensors
from tests.support.federations import lora_plan, plan_of, run, server_on
from tests.twins.adapters import NaiveAdapters
from tests.twins.federation import assert_close

FEW = {"data": {"test": 0.7}, "cohort": {"size": 5}}
#: Of what a run with AdamW moved, see tests/methods/livar/test_livar.py.
ADAMW_SHARE = 1e-2
ALPHA = {"lora": {"rank": 4, "alpha": 6}}


class NaiveFlora(NaiveAdapters):
    """Adds the mean product to the frozen weight, then begins anew with the A that it is given and B = 0."""

    def begin(self, fresh):
        for layer in self.layers:
            name = f"{layer}.lora_A.default.weight"
            self.model.get_parameter(name).data.copy_(fresh[name])
            self.model.get_parameter(f"{layer}.lora_B.default.weight").data.zero_()

    def merge(self):
        for layer in self.layers:
            scaling = self.model.get_submodule(layer).scaling["default"]
            self.base(self.model, layer).add_((scaling * self.mean_product(layer)).float())
            self.model.get_parameter(f"{layer}.lora_B.default.weight").data.zero_()


def merged_of(server):
    return server.method_state["flora"]["merged"]


@pytest.mark.parametrize("alpha", [4, 6])
def test_flora_matches_modules_that_merge_over_3_rounds(alpha, root):
    plan = lora_plan(root, ["flora"], model={"lora": {"rank": 4, "alpha": alpha}}, **FEW)
    server, naive = server_on(plan, root), NaiveFlora(plan)
    for index in range(3):
        naive.begin(server.layout.views(server.method_state["flora"]["fresh"]))
        record = server.run_round(index)
        naive.round(index)
        assert record.metrics["server/loss"] == pytest.approx(naive.loss(), abs=2e-5)
    for layer in naive.layers:
        moved = naive.base(naive.model, layer) - naive.begun[f"{layer}.base_layer.weight"]
        assert_close(merged_of(server)[layer] * (alpha / 4), moved, ADAMW_SHARE, layer)
    values = server.layout.views(server.state)
    for name in ("head.weight", "head.bias"):
        want = naive.model.get_parameter(name).detach()
        assert_close(values[name] - naive.begun[name], want - naive.begun[name], ADAMW_SHARE, name)


def test_the_sum_of_products_is_exact_where_that_of_factors_is_not(root):
    server = server_on(lora_plan(root, ["flora", "keep_factors"], local={"lr": 0.02}, **FEW), root)
    arrays = server.run_round(0).arrays
    shares = torch.from_numpy(arrays["keep_factors.num_examples"]).double()
    shares /= shares.sum()
    assert len(merged_of(server)) == 8
    for layer, got in merged_of(server).items():
        a, b = (torch.from_numpy(arrays[f"keep_factors.{layer}.{which}"]).double() for which in "ab")
        want = torch.einsum("k,kor,kri->oi", shares, b, a)
        assert_close(got, want, 1e-6, layer)
        averaged = torch.einsum("k,kor->or", shares, b) @ torch.einsum("k,kri->ri", shares, a)
        assert float((averaged - want).norm() / want.norm()) > 1e-3


def test_one_client_and_one_round_is_that_clients_model(root):
    groups = {"data": {"test": 0.7}, "cohort": {"size": 1}, "model": ALPHA}
    plain, merged = (server_on(lora_plan(root, m, **groups), root).run_round(0).metrics for m in ([], ["flora"]))
    assert merged["server/loss"] == pytest.approx(plain["server/loss"], abs=1e-6)
    assert merged["server/accuracy"] == plain["server/accuracy"]
    assert merged["flora/kept_share"] == pytest.approx(1.0, abs=1e-9)


def test_every_round_begins_with_one_new_a_and_b_zero(root):
    server = server_on(lora_plan(root, ["flora"], **FEW), root)
    seen = []
    for index in range(3):
        message, start = server._broadcast(index, 0)
        values = server.layout.views(start)
        seen.append(values["blocks.0.mlp.fc1.lora_A.default.weight"].clone())
        assert not any(value.any() for name, value in values.items() if ".lora_B." in name)
        assert torch.equal(values["head.weight"], server.layout.view(server.state, "head.weight"))
        assert message.fields["flora"]["merged"].keys() == merged_of(server).keys()
        server.run_round(index)
    spec_a = build_model(lora_plan(root, ["flora"], **FEW).spec, seed=3)
    assert torch.equal(seen[0], spec_a.blocks[0].mlp.fc1.lora_A.default.weight)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    for a in seen:
        assert 0.8 / 4 < float(a.abs().max()) <= 1 / 4  # uniform in +-1/sqrt(d_in), d_in = 16


def test_down_goes_the_dense_sum_from_the_second_round_on(root):
    server = server_on(lora_plan(root, ["flora"], **FEW), root)
    first, second = (server.run_round(index).metrics for index in range(2))
    dense = 2 * (48 * 16 + 16 * 16 + 64 * 16 + 16 * 64)
    assert second["comm/down_mb"] - first["comm/down_mb"] == pytest.approx(5 * 4 * dense / 1e6)
    assert first["comm/up_mb"] == second["comm/up_mb"] == first["comm/down_mb"] == 5 * server.layout.shared_bytes / 1e6


def test_the_saved_model_is_the_scored_one_where_the_rank_suffices(root):
    """One round of one client has the rank of the adapters; of many clients, the file keeps the nearest factors."""
    for size, is_whole in ((1, True), (5, False)):
        plan = lora_plan(root, ["flora"], model=ALPHA, data={"test": 0.7}, cohort={"size": size})
        server = server_on(plan, root)
        metrics = server.run_round(0).metrics
        spec = plan.spec
        tensors = trained_tensors(spec, server.layout, seed=3, state=server.state, counters={})
        saved = build_model(spec, seed=99)
        saved.load_state_dict(tensors)
        naive = NaiveFlora(plan)
        naive.model = saved
        assert (abs(naive.loss() - metrics["server/loss"]) < 1e-6) == is_whole
        assert abs(naive.loss() - metrics["server/loss"]) < 0.05
        assert (metrics["flora/kept_share"] > 1 - 1e-9) == is_whole
        for layer, matrix in merged_of(server).items():
            got = (
                tensors[f"{layer}.lora_B.default.weight"].double() @ tensors[f"{layer}.lora_A.default.weight"].double()
            )
            s = torch.linalg.svdvals(matrix.double())
            best = float(s[4:].norm())
            assert float((got - matrix).norm()) <= 1.02 * best + 1e-6 * float(s[0]), layer


def test_nearest_factors_of_a_low_rank_are_exact_and_else_nearly_the_best():
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(30, 3, dtype=torch.float64, generator=generator) @ torch.randn(
        3, 20, dtype=torch.float64, generator=generator
    )
    a, b = nearest_factors(low, 3, generator)
    assert (a.shape, b.shape) == ((3, 20), (30, 3))
    assert_close(b @ a, low, 1e-12)
    full = torch.randn(60, 40, dtype=torch.float64, generator=generator)
    a, b = nearest_factors(full, 5, generator)
    assert float((b @ a - full).norm()) < 1.02 * float(torch.linalg.svdvals(full)[5:].norm())


def test_adapters_that_were_trained_before_count_as_merged(root, tmp_path):
    from safetensors.torch import save_file

    first = lora_plan(root, [], **FEW)
    server, spec = run(first, root, rounds=1), first.spec
    path = tmp_path / "trained.safetensors"
    save_file(trained_tensors(spec, server.layout, seed=3, state=server.state, counters={}), path)
    plan = lora_plan(root, ["flora"], model={"pretrained": str(path)}, **FEW)
    onwards = server_on(plan, root)
    views = server.layout.views(server.state)
    for layer, matrix in merged_of(onwards).items():
        assert_close(matrix, views[f"{layer}.lora_B.default.weight"] @ views[f"{layer}.lora_A.default.weight"], 1e-6)
    naive = NaiveFlora(plan)
    naive.shares, naive.models = [1.0], [naive.model]
    naive.merge()
    naive.begin(onwards.layout.views(onwards.method_state["flora"]["fresh"]))
    assert naive.loss() == pytest.approx(server.evaluate()["server/loss"], abs=1e-5)
    record = onwards.run_round(0)
    naive.round(0)
    assert record.metrics["server/loss"] == pytest.approx(naive.loss(), abs=2e-5)


def test_where_nobody_takes_a_step_all_stays(root, monkeypatch):
    plan = lora_plan(root, ["flora"], **FEW)
    server = run(plan, root, rounds=1)
    before, state = dict(merged_of(server)), server.state.clone()

    def idle(*parts):
        cohort = Cohort(*parts)
        cohort.reports.num_steps[:] = 0
        return cohort

    monkeypatch.setattr("raysim.engine.server.Cohort", idle)
    server.run_round(1)
    assert all(torch.equal(merged_of(server)[layer], value) for layer, value in before.items())
    products = [
        server.layout.view(s, "blocks.0.mlp.fc1.lora_B.default.weight")
        @ server.layout.view(s, "blocks.0.mlp.fc1.lora_A.default.weight")
        for s in (state, server.state)
    ]
    assert_close(products[1], products[0], 0.02)


def test_a_resumed_run_has_the_same_bits(root):
    plan = lora_plan(root, ["flora"], **FEW)
    whole, begun, resumed = run(plan, root), run(plan, root, rounds=1), server_on(plan, root)
    resumed.restore(begun.snapshot())
    for index in (1, 2):
        resumed.run_round(index)
    assert resumed.params_sha256() == whole.params_sha256()
    assert unpack(resumed.snapshot().methods)["flora"]["merged"].keys() == merged_of(whole).keys()


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (["flora", "fedvg"], "fedvg cannot be combined with flora because of its `report`: a client's trained model"),
        (["flora", {"livar": {"components": "head"}}], "livar cannot be combined with flora because of its `report`"),
        (["ccvr", "flora"], "ccvr cannot be combined with flora"),
        (["moon", "flora"], "moon cannot be combined with flora"),
        (
            ["flora", {"fedvg_cosine": {"leaves": "head"}}],
            "fedvg_cosine cannot be combined with flora because of its `weigh`",
        ),
        (["flora", {"flfa": {"candidates": ["head"]}}], "flfa cannot be combined with flora because of its `forward`"),
        (["flora", "fedacg"], "A is drawn anew and B is zero"),
        (["flora", "fedavgm"], "flora and fedavgm both decide server-optimizer"),
        (["flora", "uniform"], "flora and uniform both decide weights:"),
        (
            ["flora", {"tests.support.toys:personal_head": {"head": "head"}}],
            "flora: personal models, here with head.weight",
        ),
    ],
)
def test_what_cannot_run_with_flora_is_refused(methods, words, root):
    with pytest.raises(ConfigError, match=words):
        lora_plan(root, methods, data={"validation": 0.1})


@pytest.mark.parametrize("methods", [["flora", "fedprox"], ["fedrs", "flora"], ["flora", "freeze"]])
def test_what_runs_with_flora(methods, root):
    plan = lora_plan(root, methods, **FEW)
    assert run(plan, root, rounds=2).params_sha256() != server_on(plan, root).params_sha256()


def test_model_without_adapters_is_refused(root):
    with pytest.raises(ConfigError, match=r"flora needs lora: set model\.lora"):
        plan_of(root, ["flora"])
