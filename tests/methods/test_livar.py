"""LIVAR against a naive reference written from the formulas, its property checks and degenerate cases."""

from __future__ import annotations

import copy
import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from methods.ccvr import ccvr
from methods.fisher import fisher
from methods.livar import livar
from methods.livar.math import (
    TABLES,
    adapters_of,
    class_variances,
    layer_coefficients,
    raw_coefficients,
    reduced,
    row_weights,
    stacked,
    truncated,
)
from methods.regmean import regmean
from raysim.build import model_spec
from raysim.core.errors import ConfigError
from raysim.core.seeding import derive_seed, torch_generator
from raysim.engine.plan import choose_cohort
from raysim.models import build_model
from tests.support.federations import lora_plan, plan_of, server_on
from tests.twins.federation import Naive, assert_close

LAYERS = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
FEW = {"test": 0.7}
COLUMNS = {"released": [0.03813978, 0.09813978, 0.19313978], "paper": [0.038, 0.100, 0.193]}
ROWS = {
    "released": [COLUMNS["released"], [0.03813978, 0.08813978, 0.11813978], [0.03813978, 0.07813978, 0.09313978]],
    "paper": [COLUMNS["paper"], [0.038, 0.089, 0.118], [0.038, 0.078, 0.093]],
}


class NaiveLivar(Naive):
    """LIVAR with plain modules, dense products and loops over clients, layers and classes."""

    def __init__(self, plan, **options):
        super().__init__(plan, channels_last=False)
        self.options = {
            "components": "both", "importance": "abs_of_sum", "accumulate": "run", "table": "released",
            "variance": "correct", "next": "factors", "evaluate": "merged", "layers": "importance", **options,
        }  # fmt: skip
        self.kept = {}
        self.layers = [
            name[: -len(".base_layer.weight")] for name in self.values() if name.endswith("base_layer.weight")
        ]

    def values(self):
        return {name: value.detach() for name, value in self.model.named_parameters()}

    def follow(self, server):
        """Go on from exactly where the server is: what rounding did in one round does not grow in the next."""
        for name, value in server.layout.views(server.state).items():
            self.model.get_parameter(name).data.copy_(value)

    @staticmethod
    def factor(model, layer, which):
        return model.get_parameter(f"{layer}.lora_{which}.default.weight").detach()

    def train(self, client, round_index):
        local = self.config.local
        model = copy.deepcopy(self.model).train()
        rows = self.plan.manifest.clients[client]
        values = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(values, lr=local.lr, weight_decay=local.weight_decay)
        generator = torch_generator(derive_seed(self.config.seed, "batches", round_index, client))
        sums = {layer: [0.0, 0.0] for layer in self.layers}
        order = torch.randperm(len(rows), generator=generator).numpy()
        for start in range(0, len(rows), local.batch_size):
            x, y = self.batch(rows[order[start : start + local.batch_size]])
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            keys = [(layer, which) for layer in self.layers for which in "AB"]
            factors = {(k, w): model.get_parameter(f"{k}.lora_{w}.default.weight") for k, w in keys}
            grads = {key: p.grad.double().clone() for key, p in factors.items()}
            before = {key: p.detach().double().clone() for key, p in factors.items()}
            torch.nn.utils.clip_grad_norm_(values, local.max_grad_norm)
            optimizer.step()
            for layer in self.layers:
                for index, which in enumerate("AB"):
                    g, d = grads[layer, which], before[layer, which] - factors[layer, which].detach().double()
                    sums[layer][index] += {
                        "abs_of_sum": abs(float((g * d).sum())),
                        "signed": float((g * d).sum()),
                        "sum_of_abs": float((g * d).abs().sum()),
                        "grad_only": abs(float(g.sum())),
                    }[self.options["importance"]]
        return model, sums

    @torch.no_grad()
    def features(self, model, rows):
        x, y = self.batch(rows)
        model.eval()
        z = model.forward_head(model.forward_features(x), pre_logits=True)
        return z, y, model(x).argmax(1)

    @torch.no_grad()
    def released_features(self, model, rows):
        """Of the pre-trained model: what is not an adapter never moves. Pixels as they are, 0 to 1."""
        bare = build_model(model_spec(self.config, 10, self.images.info.shape), seed=self.config.seed).eval()
        for layer in self.layers:
            assert not self.factor(bare, layer, "B").any()
        pixels, y = self.images.take(rows)
        x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
        return bare.forward_head(bare.forward_features(x), pre_logits=True), torch.from_numpy(y), None

    def batch(self, rows):
        x, y = super().batch(rows)
        return ((x - 0.5) / 0.5 if self.config.data.normalise == "half" else x), y

    def variances(self, model, client, is_all):
        take = self.released_features if self.options["variance"] == "released" else self.features
        z, y, guess = take(model, self.plan.manifest.clients[client])
        found = []
        for label in range(10):
            use = (y == label) if is_all else (y == label) & (guess == label)
            found.append(float(z[use].double().var(0, unbiased=True).mean()) if int(use.sum()) >= 2 else None)
        return found

    def round(self, round_index):
        opt = self.options
        clients = [
            int(c)
            for c in choose_cohort(
                self.config.partition.num_clients, self.config.cohort_size, seed=self.config.seed,
                round_index=round_index,
            )
        ]  # fmt: skip
        sizes = [len(self.plan.manifest.clients[c]) for c in clients]
        shares = [n / sum(sizes) for n in sizes]
        trained = [self.train(c, round_index) for c in clients]
        models = [model for model, _ in trained]
        for client, (_, sums) in zip(clients, trained, strict=True):
            old = self.kept.get(client) if opt["accumulate"] == "run" else None
            old = old or {layer: [0.0, 0.0] for layer in self.layers}
            self.kept[client] = {k: [old[k][0] + sums[k][0], old[k][1] + sums[k][1]] for k in self.layers}
        self.importance = np.array([[self.kept[c][layer] for layer in self.layers] for c in clients])
        self.coefficients = self.table(self.importance, opt["table"])
        if opt["components"] == "head" or opt["layers"] == "examples":
            self.coefficients = {layer: shares for layer in self.layers}
        self.heads = self.head_weights(models, clients, shares)
        self.merge(models, shares)

    def table(self, importance, name):
        a1, a2 = np.quantile(importance[:, :, 0], [0.25, 0.50])
        b1, b2 = np.quantile(importance[:, :, 1], [0.60, 0.80])
        coefficients = {}
        for index, layer in enumerate(self.layers):
            raw = []
            for ia, ib in importance[:, index]:
                row = "low" if ia < a1 else "high" if ia > a2 else "mid"
                column = "low" if ib < b1 else "high" if ib > b2 else "mid"
                raw.append(ROWS[name][["low", "mid", "high"].index(row)][["low", "mid", "high"].index(column)])
            coefficients[layer] = [value / sum(raw) for value in raw]
        return coefficients

    def head_weights(self, models, clients, shares):
        if self.options["components"] == "lora":
            return [shares] * 10
        is_all = self.options["variance"] != "correct"
        own = [self.variances(m, c, is_all) for m, c in zip(models, clients, strict=True)]
        every = [self.variances(m, c, True) for m, c in zip(models, clients, strict=True)]
        counts = [np.bincount(self.batch(self.plan.manifest.clients[c])[1], minlength=10) for c in clients]
        weights = []
        for label in range(10):
            found = [v[label] for v in own], [v[label] for v in every], [int(n[label]) for n in counts]
            for scores in found[:2] if self.options["variance"] == "released" else found:
                total = sum(s or 0.0 for s in scores)
                if total > 0:
                    weights.append([(s or 0.0) / total for s in scores])
                    break
            else:
                weights.append(None)
        return weights

    def merge(self, models, shares):
        opt, old = self.options, copy.deepcopy(self.model)
        for label, weights in enumerate(self.heads):
            if weights is not None:
                for part in ("weight", "bias"):
                    rows = [
                        w * m.head.get_parameter(part).detach()[label] for w, m in zip(weights, models, strict=True)
                    ]
                    self.model.head.get_parameter(part).data[label] = sum(rows)
        self.scored = copy.deepcopy(self.model)
        self.updates = {}
        for layer in self.layers:
            c = self.coefficients[layer]
            a, b = ([self.factor(m, layer, w) for m in models] for w in "AB")
            dense = sum(w * bk.double() @ ak.double() for w, ak, bk in zip(c, a, b, strict=True))
            self.updates[layer] = dense
            if opt["next"] == "svd":
                u, s, vt = torch.linalg.svd(dense)
                new_b, new_a = u[:, :4] * s[:4].sqrt(), s[:4].sqrt()[:, None] * vt[:4]
            else:
                new_a, new_b = (sum(w * f for w, f in zip(c, part, strict=True)) for part in (a, b))
            for which, value in (("A", new_a), ("B", new_b)):
                self.model.get_parameter(f"{layer}.lora_{which}.default.weight").data = value.float().contiguous()
            if opt["evaluate"] == "code":
                dense = sum(w * bk.double() @ ak.double() for w, ak, bk in zip(shares, a, b, strict=True))
            if opt["evaluate"] == "factors":
                dense = new_b.double() @ new_a.double()
            base = old.get_parameter(f"{layer}.base_layer.weight").data
            self.scored.get_parameter(f"{layer}.base_layer.weight").data = base + dense.float()
            self.scored.get_parameter(f"{layer}.lora_B.default.weight").data.zero_()

    @torch.no_grad()
    def loss(self):
        x, y = self.batch(self.plan.manifest.test)
        return float(F.cross_entropy(self.scored.eval()(x), y))


VARIANTS = {
    "default": {},
    "signed-paper-round": {"importance": "signed", "table": "paper", "accumulate": "round"},
    "sum_of_abs-all": {"importance": "sum_of_abs", "variance": "all", "evaluate": "factors"},
    "code": {"evaluate": "code"},
    "svd": {"next": "svd"},
    "lora": {"components": "lora"},
    "head": {"components": "head"},
    "examples": {"layers": "examples"},
    "examples-svd": {"layers": "examples", "next": "svd"},
    "released": {"variance": "released", "evaluate": "code"},
    "released-off": {"variance": "released", "evaluate": "code", "layers": "examples"},
}


#: Of what a run with AdamW moved: it divides by the gradient's own size, so that entries with hardly any gradient take
#: steps of noise.
ADAMW_SHARE = 1e-2


@pytest.mark.parametrize("name", VARIANTS)
def test_livar_matches_the_formulas_over_2_rounds(name, root):
    options = VARIANTS[name]
    data = {**FEW, "normalise": "half"} if name.startswith("released") else FEW
    plan = lora_plan(root, [{"livar": options}], cohort={"size": 6}, data=data, local={"batch_size": 8})
    server, naive = server_on(plan, root), NaiveLivar(plan, **options)
    counts = options.get("components") != "head" and "layers" not in options
    for index in range(2):
        record = server.run_round(index)
        naive.round(index)
        assert ("livar.importance_a" in record.arrays) == counts
        if counts:
            for factor, key in enumerate(("importance_a", "importance_b")):
                assert_close(record.arrays[f"livar.{key}"], naive.importance[..., factor], ADAMW_SHARE)
        if options.get("components") != "head":
            want = np.array([naive.coefficients[layer] for layer in naive.layers]).T
            assert_close(record.arrays["livar.coefficients"], want)
            assert record.arrays["livar.coefficients:columns"].tolist() == naive.layers
        if options.get("components") != "lora":
            want = np.array([w or [0.0] * 6 for w in naive.heads]).T
            assert_close(record.arrays["livar.head_weights"], want)
        assert_same(server, naive)
        if options.get("components") != "head":  # which scores what it ships
            assert record.metrics["server/loss"] == pytest.approx(naive.loss(), rel=1e-5)
        naive.follow(server)


def test_grad_only_matches_where_it_is_not_zero_by_construction(root):
    """The gradient of what enters a LayerNorm sums to zero, and so does what leaves it as long as it is not scaled."""
    options = {"importance": "grad_only"}
    plan = lora_plan(root, [{"livar": options}], cohort={"size": 3}, data=FEW)
    arrays, naive = server_on(plan, root).run_round(0).arrays, NaiveLivar(plan, **options)
    naive.round(0)
    for index, layer in enumerate(LAYERS):
        factor, other = (0, 1) if layer.endswith(("proj", "fc2")) else (1, 0)
        names = ("livar.importance_a", "livar.importance_b")
        assert np.allclose(arrays[names[factor]][:, index], naive.importance[:, index, factor], rtol=1e-4)
        assert arrays[names[factor]][:, index].min() > 1e-4
        assert arrays[names[other]][:, index].max() < 1e-6


def assert_same(server, naive):
    """Head, broadcast product and frozen matrix of every layer agree."""
    views, begun = server.layout.views(server.state), naive.begun
    for part in ("weight", "bias"):
        name = f"head.{part}"
        assert_close(views[name] - begun[name], naive.model.state_dict()[name] - begun[name], ADAMW_SHARE, name)
    for layer in naive.layers:
        product = views[f"{layer}.lora_B.default.weight"] @ views[f"{layer}.lora_A.default.weight"]
        want = naive.factor(naive.model, layer, "B") @ naive.factor(naive.model, layer, "A")
        assert_close(product, want, ADAMW_SHARE, layer)


# --- the table ----------------------------------------------------------------------------------------------------


def some_importance(clients=5, layers=8, seed=0):
    return torch.rand(clients, layers, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def coefficients(importance, active=None, table="released"):
    active = torch.ones(len(importance), dtype=torch.bool) if active is None else torch.tensor(active)
    shares = active.double() / active.sum().clamp_min(1)
    return layer_coefficients(importance, active, shares, table)


def test_tables_are_the_published_ones():
    assert {name: [list(row) for row in table] for name, table in TABLES.items()} == ROWS


def test_raw_coefficients_by_hand():
    importance = torch.tensor([[[0.0, 5.0]], [[1.0, 0.0]], [[2.0, 4.0]], [[3.0, 1.0]], [[4.0, 2.0]]])
    # I_A quantiles 1 and 2, I_B quantiles 2.8 (0.60) and 4.2 (0.80) with linear interpolation.
    assert raw_coefficients(importance.double())[:, 0].tolist() == [
        0.19313978,  # low, high
        0.03813978,  # mid (equal to the threshold), low
        0.08813978,  # mid, mid
        0.03813978,  # high, low
        0.03813978,
    ]


def test_coefficients_sum_to_one_within_the_tables_ratio():
    for seed in range(5):
        table = coefficients(some_importance(seed=seed))
        assert (table.sum(0) - 1).abs().max() < 1e-12
        assert table.min() > 0
        assert (table.amax(0) / table.amin(0)).max() <= 0.19313978 / 0.03813978 + 1e-12


def test_coefficients_depend_on_the_order_of_importances_only():
    importance = some_importance()
    want = coefficients(importance)
    assert torch.equal(coefficients(importance * torch.tensor([3.0, 0.01], dtype=torch.float64)), want)
    # Interpolated thresholds move with the transform, but stay between the same two values.
    assert torch.equal(coefficients(importance.exp()), want)
    swapped = coefficients(importance[[1, 0, 2, 3, 4]])
    assert torch.allclose(swapped[[1, 0, 2, 3, 4]], want, atol=1e-15)


def test_raw_coefficients_are_monotone_in_both_bins():
    for table in TABLES.values():
        values = torch.tensor(table)
        assert (values.diff(dim=1) >= 0).all()
        assert (values.diff(dim=0) <= 0).all()


def test_equal_importances_and_one_participant():
    for value in (0.0, 7.0):
        equal = torch.full((4, 3, 2), value, dtype=torch.float64)
        assert (raw_coefficients(equal) == 0.08813978).all()
        assert torch.allclose(coefficients(equal), torch.full((4, 3), 0.25, dtype=torch.float64), atol=1e-15)
    assert torch.equal(coefficients(some_importance(1)), torch.ones(1, 8, dtype=torch.float64))


def test_identical_clients_get_uniform_coefficients():
    table = coefficients(some_importance(1).expand(4, -1, -1))
    assert torch.allclose(table, torch.full((4, 8), 0.25, dtype=torch.float64), atol=1e-15)


def test_mostly_zero_importances_leave_nothing_low():
    importance = some_importance()
    importance[:4, :, 1] = 0.0
    assert (raw_coefficients(importance)[:4] > 0.04).all()


def test_idle_clients_count_neither_in_quantiles_nor_in_weights():
    importance = some_importance()
    table = coefficients(importance, [True, False, True, True, True])
    assert torch.equal(table[1], torch.zeros(8, dtype=torch.float64))
    assert torch.equal(table[[0, 2, 3, 4]], coefficients(importance[[0, 2, 3, 4]]))
    assert torch.equal(coefficients(importance, [False] * 5), torch.zeros(5, 8, dtype=torch.float64))


def test_non_finite_importance_gives_shares_for_that_layer():
    importance = some_importance()
    importance[2, 3, 0] = math.inf
    shares = torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2], dtype=torch.float64)
    table = layer_coefficients(importance, torch.ones(5, dtype=torch.bool), shares)
    assert torch.equal(table[:, 3], shares)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(table[:, others], coefficients(importance[:, others]))


# --- importance ---------------------------------------------------------------------------------------------------


def test_reductions_by_hand():
    grad, moved = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, 1.0, 0.25])
    values = {name: float(reduced(grad, moved, name)) for name in ("abs_of_sum", "signed", "sum_of_abs", "grad_only")}
    assert values == {"abs_of_sum": 0.75, "signed": -0.75, "sum_of_abs": 3.25, "grad_only": 2.0}


def fake_client(layout, start, memory=None):
    return SimpleNamespace(
        layout=layout, start=start, params=start.clone(), scratch={}, memory={} if memory is None else memory
    )


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_importance_of_plain_sgd_is_lr_times_squared_gradients(lr, root):
    layout = lora_plan(root).layout
    start = torch.randn(layout.num_params)
    method, client = livar(components="lora"), fake_client(layout, start)
    gradient = method.grads(lambda params, batch: 2 * params, client)
    want = torch.zeros(len(LAYERS), 2, dtype=torch.float64)
    for _ in range(3):
        grad = gradient(client.params, None)
        for index, pair in enumerate(adapters_of(layout)):
            for factor, leaf in enumerate((pair.a, pair.b)):
                want[index, factor] += lr * grad[leaf.offset : leaf.end].double().square().sum()
        client.params.sub_(lr * grad)
        grad.fill_(99.0)  # what others do to it afterwards does not count
    got = method.report(client)["importance"]
    assert torch.allclose(got, want, rtol=1e-5)
    # Cumulative: what the memory holds is added to, once.
    assert torch.equal(client.memory["importance"], got)
    again = fake_client(layout, start, client.memory)
    method.grads(lambda params, batch: params, again)
    assert torch.equal(method.report(again)["importance"], got)
    fresh = livar(components="lora", accumulate="round")
    idle = fake_client(layout, start)
    fresh.grads(lambda params, batch: params, idle)
    assert torch.equal(fresh.report(idle)["importance"], torch.zeros_like(got))
    assert not idle.memory


# --- the head -----------------------------------------------------------------------------------------------------


def test_class_variances_and_their_degenerate_cases():
    values = torch.tensor([[1.0, 2.0], [3.0, 2.0], [0.1, 0.7], [0.1, 0.7], [0.1, 0.7], [5.0, 5.0]])
    got = class_variances(values, torch.tensor([0, 0, 1, 1, 1, 2]), 4)
    assert got[0] == 1.0  # (2 + 0) / 2
    assert got[1] == 0.0  # identical features: exactly
    assert got[2].isnan()  # one example
    assert got[3].isnan()  # nobody's
    scaled = class_variances(values * 3, torch.tensor([0, 0, 1, 1, 1, 2]), 4)
    assert scaled[0] == 9.0


def test_row_weights_fall_back_class_by_class():
    nan = math.nan
    correct = torch.tensor([[2.0, nan, nan, 0.0, nan], [6.0, nan, nan, 0.0, nan], [nan, nan, nan, nan, nan]]).double()
    every = torch.tensor([[9.0, 1.0, nan, 0.0, nan], [9.0, nan, nan, nan, nan], [9.0, nan, nan, nan, nan]]).double()
    counts = torch.tensor([[5.0, 3.0, 1.0, 4.0, 0.0], [5.0, 0.0, 0.0, 1.0, 0.0], [5.0, 1.0, 1.0, 0.0, 0.0]]).double()
    active = torch.ones(3, dtype=torch.bool)
    assert row_weights([correct, every, counts], active).T.tolist() == [
        [0.25, 0.75, 0.0],  # the variances of the holders
        [1.0, 0.0, 0.0],  # nobody is right: all samples; one holder takes all
        [0.5, 0.0, 0.5],  # one sample each: counts
        [0.8, 0.2, 0.0],  # identical features: counts
        [0.0, 0.0, 0.0],  # nobody has it: the row stays
    ]
    idle = row_weights([correct, every, counts], torch.tensor([False, True, True]))
    assert idle.T.tolist()[0] == [0.0, 1.0, 0.0]
    assert idle.T.tolist()[2] == [0.0, 0.0, 1.0]


def test_unseen_class_keeps_row_and_bias_and_one_holder_gives_its_own(root):
    groups = {"partition": {"scheme": "shards", "shards_per_client": 1, "num_clients": 12}, "cohort": {"size": 2}}
    plan = lora_plan(root, [{"livar": {"variance": "all"}}], **groups)
    server = server_on(plan, root)
    before = {name: value.clone() for name, value in server.layout.views(server.state).items()}
    record = server.run_round(0)
    held = server.sizes.class_counts[record.clients["client"]].sum(0) > 0
    assert not held.all()
    weights = record.arrays["livar.head_weights"]
    assert np.allclose(weights.sum(0), held)
    after = server.layout.views(server.state)
    for part in ("head.weight", "head.bias"):
        moved = (after[part] != before[part]).reshape(10, -1).any(1).numpy()
        assert (moved == held).all()


# --- products and the way back ------------------------------------------------------------------------------------


def factors(clients, rank, d_in, d_out, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(clients, rank, d_in, dtype=torch.float64, generator=generator)
    b = torch.randn(clients, d_out, rank, dtype=torch.float64, generator=generator)
    weights = torch.rand(clients, dtype=torch.float64, generator=generator)
    return weights / weights.sum(), a, b


@pytest.mark.parametrize("shape", [(3, 2, 9, 7), (5, 4, 9, 7), (5, 4, 7, 9)])
def test_merged_product_and_its_best_approximation(shape):
    weights, a, b = factors(*shape)
    dense = sum(w * bk @ ak for w, ak, bk in zip(weights, a, b, strict=True))
    left, right = stacked(weights, a, b)
    assert left.shape[1] == min(shape[0] * shape[1], shape[2], shape[3])
    assert torch.allclose(left @ right, dense, atol=1e-12)
    gram = sum(
        weights[i] * weights[j] * ((b[i].T @ b[j]) * (a[i] @ a[j].T)).sum()
        for i in range(shape[0])
        for j in range(shape[0])
    )
    assert float(dense.square().sum()) == pytest.approx(float(gram))
    rank = shape[1]
    new_a, new_b = truncated(left, right, rank)
    tail = torch.linalg.svdvals(dense)[rank:]
    assert float((new_b @ new_a - dense).square().sum()) == pytest.approx(float(tail.square().sum()))
    assert torch.allclose(new_a @ new_a.T, new_b.T @ new_b, atol=1e-10)  # balanced: sqrt(S) on either side


def test_one_client_makes_all_ways_agree_and_identical_clients_are_any_of_them():
    _, a, b = factors(1, 4, 9, 7)
    product = b[0] @ a[0]
    new_a, new_b = truncated(*stacked(torch.ones(1, dtype=torch.float64), a, b), 4)
    assert torch.allclose(new_b @ new_a, product, atol=1e-12)
    same = torch.full((3,), 1 / 3, dtype=torch.float64)
    left, right = stacked(same, a.expand(3, -1, -1), b.expand(3, -1, -1))
    assert torch.allclose(left @ right, product, atol=1e-12)


def test_a_product_of_low_rank_is_padded_with_zeros():
    new_a, new_b = truncated(torch.ones(7, 1, dtype=torch.float64), torch.ones(1, 9, dtype=torch.float64), 4)
    assert torch.allclose(new_b @ new_a, torch.ones(7, 9, dtype=torch.float64))
    assert not new_a[1:].any()


def test_one_participant_ships_and_scores_that_client_whatever_next_is(root):
    shipped = []
    for way in ("factors", "svd"):
        plan = lora_plan(root, [{"livar": {"next": way}}], cohort={"size": 1}, data=FEW)
        server = server_on(plan, root)
        scored = server.run_round(0).metrics["server/loss"]
        shipped.append(server.evaluate()["server/loss"])
        assert scored == pytest.approx(shipped[-1], abs=1e-5)
    assert shipped == pytest.approx([shipped[0]] * 2, abs=1e-5)


def test_head_component_runs_without_adapters_and_with_batch_norm(root):
    groups = {"model": {"norm": "batch"}, "data": FEW}
    server = server_on(plan_of(root, [{"livar": {"components": "head"}}], **groups), root)
    plain = server_on(plan_of(root, **groups), root)
    for one in (server, plain):
        one.run_round(0)
    mine, theirs = (one.layout.views(one.state) for one in (server, plain))
    assert {name for name in mine if not torch.equal(mine[name], theirs[name])} == {"fc2.weight", "fc2.bias"}


# --- the paper's table 4 ------------------------------------------------------------------------------------------

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
        ({"components": "head", "table": "paper"}, "livar: table has no effect with components: head; drop it"),
        ({"components": "head", "layers": "examples", "next": "svd"}, "layers, next have no effect"),
        ({"components": "lora", "variance": "all"}, "variance has no effect with components: lora"),
        ({"layers": "examples", "accumulate": "round"}, "accumulate has no effect with layers: examples"),
    ],
)
def test_options_without_effect_warn(options, words):
    with pytest.warns(UserWarning, match=words):
        livar(**options)


@pytest.mark.parametrize("options", [*VARIANTS.values(), *CELLS.values()])
def test_options_with_effect_do_not_warn(options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        livar(**options)


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (ccvr, {"batch_size": 64, "loss": "plain"}, "ccvr: batch_size has no effect with as_in fed-mammoth"),
        (regmean, {"shrink": 0.1}, "regmean: shrink has"),
        (fisher, {"kind": "empirical"}, "fisher: kind has"),
    ],
)
def test_options_beside_as_in_warn(make, options, words):
    with pytest.warns(UserWarning, match=words):
        make(as_in="fed-mammoth", **options)


# --- composition --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (["livar", "fedvg"], "livar and fedvg both decide weights:"),
        (["livar", "uniform"], "livar and uniform both decide weights:"),
        (["livar", "fisher"], "livar and fisher both decide merge"),
        (["livar", "fedavgm"], "livar and fedavgm both decide server-optimizer"),
        ([{"livar": {"layers": "examples"}}, "fedvg"], "livar and fedvg both decide weights:"),
        (["livar", {"livar": {"components": "head"}}], "livar is listed twice"),
    ],
)
def test_what_cannot_run_with_livar_is_refused(methods, words, root):
    with pytest.raises(ConfigError, match=words):
        lora_plan(root, methods)


@pytest.mark.parametrize(
    "methods",
    [
        ["livar", "ccvr"],
        ["livar", {"ccvr": {"as_in": "fed-mammoth"}}],
        ["livar", "fedprox"],
        [{"livar": {"evaluate": "factors"}}, "fedavgm"],
        [{"livar": {"components": "head"}}, "fedavgm"],
    ],
)
def test_what_runs_with_livar(methods, root):
    lora_plan(root, methods)


@pytest.mark.parametrize(("options", "scalars"), [({}, 2 * 8 + 2 * 10), ({"variance": "all"}, 2 * 8 + 10)])
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
