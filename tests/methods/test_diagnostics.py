"""Diagnostics against plain double loops, and proof that they touch nothing."""

from __future__ import annotations

import math
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from methods.diagnostics import effective_rank
from raysim.base.errors import ConfigError, MethodError
from raysim.core.method import Method
from raysim.data.federation import Federation
from raysim.engine.messages import pack
from raysim.engine.scorer import map_features, slices_of
from tests.support.federations import lora_plan, plan_of, run, server_on
from tests.twins.local import UniVarFL, stop_gradient_feedback

BATCH_NORM = {"norm": "batch"}
FEATURES = ("intra", "inter", "separability")


def spy_updates():
    """Keeps every client's update and the new parameters where tests can look."""

    def server_update(update, state, server):
        updates = torch.stack(server.map_updates(lambda mine, shared: mine, None))
        return update, {"updates": updates, "is_active": server.is_active}

    return Method("spy_updates", server_update=server_update)


def asks_without_need():
    def evaluated(state, server):
        server.map_features(lambda features, labels, shared: 0)
        return {}

    return Method("asks_without_need", evaluation_override=evaluated)


def measured(plan, root, rounds=1, pool=None):
    """(server, the records of its rounds)."""
    server = server_on(plan, root, pool)
    return server, [server.run_round(index) for index in range(rounds)]


def test_drift_matches_plain_loops(root):
    server, (record,) = measured(plan_of(root, ["tests.methods.test_diagnostics:spy_updates", "diagnostics"]), root)
    updates = [u.double().tolist() for u in server.method_state["spy_updates"]["updates"]]
    mean = [sum(column) / len(updates) for column in zip(*updates, strict=True)]
    want = 0.0
    for update in updates:
        want += math.sqrt(sum((mine - theirs) ** 2 for mine, theirs in zip(update, mean, strict=True)))
    assert record.metrics["diagnostics/drift"] == pytest.approx(want / len(updates), rel=1e-5)


def test_drift_leaves_idle_clients_and_personal_layers_out(root):
    methods = ["tests.support.toys:personal_head", "tests.methods.test_diagnostics:spy_updates"]
    plan = plan_of(
        root, [*methods, {"diagnostics": {"measures": ["drift"]}}], partition={"alpha": 0.05}, cohort={"size": 12}
    )
    server, (record,) = measured(plan, root)
    seen = server.method_state["spy_updates"]
    shared = [leaf for leaf in server.layout.params if leaf.is_shared]
    columns = torch.cat([torch.arange(leaf.offset, leaf.end) for leaf in shared])
    updates = seen["updates"][seen["is_active"]][:, columns].double()
    want = float((updates - updates.mean(0)).norm(dim=1).mean())
    assert record.metrics["diagnostics/drift"] == pytest.approx(want, rel=1e-5)


def test_drift_by_layer_matches_plain_loops(root):
    methods = ["tests.support.toys:personal_head", "tests.methods.test_diagnostics:spy_updates"]
    plan = plan_of(
        root, [*methods, {"diagnostics": {"measures": ["layer_drift"]}}], partition={"alpha": 0.05}, cohort={"size": 12}
    )
    server, (record,) = measured(plan, root)
    seen = server.method_state["spy_updates"]
    updates = seen["updates"][seen["is_active"]].double()
    want = []
    for name in ("conv1", "conv2", "fc1"):  # fc2, the head, is personal
        leaf = server.layout.by_name[f"{name}.weight"]
        parts = updates[:, leaf.offset : leaf.end]
        want.append(sum(float((part - parts.mean(0)).norm()) for part in parts) / len(parts))
    assert record.arrays["diagnostics.layer_drift:columns"].tolist() == ["conv1", "conv2", "fc1"]
    assert record.arrays["diagnostics.layer_drift"].tolist() == pytest.approx(want, rel=1e-5)
    assert "diagnostics/drift" not in record.metrics


def test_drift_of_identical_clients_is_zero(root):
    plan = plan_of(root, [{"diagnostics": {"measures": ["drift"]}}], cohort={"size": 1})
    _, (record,) = measured(plan, root)
    assert record.metrics["diagnostics/drift"] == pytest.approx(0, abs=1e-7)


def features_by_hand(plan, server, root):
    """Features of the whole test set at the server's model, one example after the other: (n, width), (n,)."""
    trainer = server.pool._trainer
    trainer.model.load(server.state, server.counters)
    trainer.model.module.eval()
    images, labels = trainer.data.federation.held_out("test")
    rows = []
    for image in images:
        inputs = trainer.transform(torch.from_numpy(image.copy())[None])
        with torch.no_grad():
            rows.append(trainer.model.forward(inputs).features[0].double().numpy())
    return np.stack(rows), np.asarray(labels)


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_separation_matches_plain_loops(norm, root):
    plan = plan_of(root, ["diagnostics", "fedavgm"], model={"norm": norm})
    server, (record,) = measured(plan, root)
    features, labels = features_by_hand(plan, server, root)
    centres = {c: np.mean([z for z, y in zip(features, labels, strict=True) if y == c], axis=0) for c in set(labels)}
    intra = np.mean([np.linalg.norm(z - centres[y]) for z, y in zip(features, labels, strict=True)])
    gaps = [np.linalg.norm(centres[a] - centres[b]) for a, b in combinations(sorted(centres), 2)]
    want = (intra, np.mean(gaps), np.mean(gaps) / intra)
    got = [record.metrics[f"diagnostics/{name}"] for name in FEATURES]
    assert got == pytest.approx(want, rel=1e-5)


def test_the_spectrum_is_the_new_classifiers(root):
    """After every method's server_update, wherever diagnostics stands."""
    for methods in (["diagnostics", "fedavgm"], ["fedavgm", "diagnostics"]):
        server, records = measured(plan_of(root, methods), root, rounds=2)
        weight = server.layout.view(server.params, "fc2.weight").double()
        values = records[-1].arrays["diagnostics.singular_values"]
        assert values[0] == pytest.approx(float(torch.linalg.matrix_norm(weight, 2)), rel=1e-9)
        assert float((values**2).sum()) == pytest.approx(float(weight.square().sum()), rel=1e-9)
        assert records[-1].metrics["diagnostics/effective_rank"] == pytest.approx(effective_rank(torch.tensor(values)))


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_feedback_is_measured_at_the_clients_models(norm, root):
    """||g_FA - g|| by plain autograd, and the norms and gaps of the chosen layer's weights by loops."""
    methods = [{"flfa": {"candidates": ["fc1"]}}, "tests.methods.test_diagnostics:spy_updates"]
    plan = plan_of(
        root, [*methods, {"diagnostics": {"measures": ["feedback"]}}], model={"norm": norm}, cohort={"size": 3}
    )
    server = server_on(plan, root)
    assert not any("feedback" in name for name in server.run_round(0).metrics)  # plain backpropagation
    start = server.state.clone()
    record = server.run_round(1)
    updates, trainer = server.method_state["spy_updates"]["updates"], server.pool._trainer
    layout, model = server.layout, trainer.model
    leaf = layout.by_name["fc1.weight"]
    errors, sizes, weights = [], [], []
    for client, update in zip(record.clients["client"].tolist(), updates, strict=True):
        images, labels = trainer.data.federation.client(client)
        x, y = trainer.transform(torch.from_numpy(images.copy())), torch.from_numpy(labels.copy())
        model.load(start)
        model.params.add_(update)
        module, found = model.module.train(), []
        weight, anchor = layout.view(model.params, leaf).clone(), layout.view(start, leaf)
        back = anchor * weight.norm() / anchor.norm()
        for is_plain in (True, False):
            if not is_plain:
                module.fc1.forward = partial(stop_gradient_feedback, module.fc1, back=back)
            grads = torch.autograd.grad(F.cross_entropy(module(x), y), list(module.parameters()))
            found.append(torch.cat([g.reshape(-1).double() for g in grads]))
        del module.fc1.forward
        errors.append(float((found[1] - found[0]).norm()))
        sizes.append(float(found[0].norm()))
        weights.append(weight.double())
    assert record.metrics["diagnostics/feedback_error"] == pytest.approx(np.mean(errors), rel=1e-3)
    assert record.metrics["diagnostics/local_gradient_norm"] == pytest.approx(np.mean(sizes), rel=1e-3)
    assert min(errors) > 1e-3
    norms = [float(weight.norm()) for weight in weights]
    assert record.arrays["diagnostics.weight_norms"][:, 0] == pytest.approx(norms, rel=1e-5)
    assert record.arrays["diagnostics.weight_norms:columns"].tolist() == ["fc1"]
    pairs = list(combinations(range(3), 2))
    gap = np.mean([(norms[i] - norms[j]) ** 2 for i, j in pairs]) ** 0.5
    assert record.metrics["diagnostics/weight_norm_gap"] == pytest.approx(gap, rel=1e-3)
    far = np.mean([float((weights[i] - weights[j]).square().sum()) for i, j in pairs]) ** 0.5
    assert record.metrics["diagnostics/weight_gap"] == pytest.approx(far, rel=1e-3)


@pytest.mark.slow
def test_feedback_in_the_first_layer_has_no_error_and_touches_nothing(root):
    groups = {"model": {"norm": "batch"}, "partition": {"alpha": 0.05}, "cohort": {"size": 12}}
    flfa = {"flfa": {"candidates": ["conv1"]}}
    measures = {"diagnostics": {"measures": ["feedback", "drift"]}}
    server, records = measured(plan_of(root, [flfa, "fedvg", measures], **groups), root, rounds=2)
    assert records[1].metrics["diagnostics/feedback_error"] == 0
    assert records[1].metrics["diagnostics/local_gradient_norm"] > 0
    plain = run(plan_of(root, [flfa, "fedvg"], **groups), root, rounds=2)
    assert server.params_sha256() == plain.params_sha256()


def test_effective_rank_by_hand():
    assert effective_rank(torch.tensor([2.0, 2.0, 2.0])) == pytest.approx(3)
    assert effective_rank(torch.tensor([5.0, 0.0, 0.0])) == pytest.approx(1)
    assert effective_rank(torch.tensor([0.0, 0.0])) == 0
    want = math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert effective_rank(torch.tensor([3.0, 1.0])) == pytest.approx(want)


def test_agreement_is_flfas(root):
    plan = plan_of(root, [{"flfa": {"candidates": ["conv2", "fc1"]}}, "diagnostics"])
    _, (record,) = measured(plan, root)
    columns = record.arrays["diagnostics.agreement:columns"].tolist()
    assert columns == ["conv1", "conv2", "fc1", "fc2"]
    assert np.array_equal(record.arrays["diagnostics.agreement"][1:3], record.arrays["flfa.agreement"])
    assert record.metrics["diagnostics/agreement_mean"] == pytest.approx(record.arrays["diagnostics.agreement"].mean())
    assert record.arrays["flfa.selected"].sum() == 1
    assert record.arrays["flfa.selected:columns"].tolist() == ["conv2", "fc1"]
    assert record.arrays["flfa.selected"][int(record.metrics["flfa/layer"])] == 1


def test_gradient_is_that_of_the_global_objective(root):
    """Theorem 1 of UniVarFL: sum_k n_k/N grad L_k at the broadcast point, L_k with the terms of the methods before it."""
    methods = [{"univarfl": {"mu": 0.3}}, {"fedprox": {"mu": 5.0}}, {"diagnostics": {"measures": ["gradient"]}}]
    plan = plan_of(root, methods, cohort={"size": 4})
    twin = UniVarFL(plan, mu=0.3, lam=2.5, eps=1.0)
    server = server_on(plan, root)
    for index in range(2):
        record = server.run_round(index)
        clients = [int(c) for c in record.clients["client"]]
        total = sum(len(plan.manifest.clients[c]) for c in clients)
        grads = [torch.zeros_like(p) for p in twin.model.parameters()]
        for client in clients:
            rows = twin.pass_rows(client)
            for start in range(0, len(rows), plan.config.local.batch_size):
                x, y = twin.batch(rows[start : start + plan.config.local.batch_size])
                found = torch.autograd.grad(twin.loss(twin.model, x, y), list(twin.model.parameters()))
                for grad, part in zip(grads, found, strict=True):
                    grad += len(y) / total * part
        want = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads))
        assert record.metrics["diagnostics/gradient_norm"] == pytest.approx(want, rel=1e-4)
        for name, value in twin.model.state_dict().items():
            value.copy_(server.layout.view(server.state, name))


def test_the_order_of_the_rows_in_the_set_hardly_moves_a_measure(root, monkeypatch):
    """Sets read from folders lie class after class: in batches of one class BatchNorm sees other statistics."""
    part, methods = {"scheme": "iid", "num_clients": 3}, [{"diagnostics": {"measures": ["gradient"]}}]
    plan = plan_of(root, methods, model=BATCH_NORM, partition=part, cohort={"size": 3}, data={"test": 0.2}, rounds=9)
    read, norms = Federation.client, []

    def by_class(federation, client):
        inputs, targets = read(federation, client)
        order = np.argsort(targets, kind="stable")
        return inputs[order], targets[order]

    for client in (read, by_class):
        server = run(plan, root, rounds=8)
        with monkeypatch.context() as patch:
            patch.setattr(Federation, "client", client)
            norms.append(server.run_round(8).metrics["diagnostics/gradient_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=0.1)


@pytest.mark.slow
def test_gradient_has_to_be_asked_for_and_goes_through_batch_norm(root):
    _, (record,) = measured(plan_of(root, ["diagnostics"]), root)
    assert "diagnostics/gradient_norm" not in record.metrics
    plain = run(plan_of(root, ["moon"], model=BATCH_NORM), root)
    methods = ["moon", {"diagnostics": {"measures": ["gradient"], "every": 2}}]
    server, records = measured(plan_of(root, methods, model=BATCH_NORM), root, rounds=3)
    assert server.params_sha256() == plain.params_sha256()
    assert ["diagnostics/gradient_norm" in record.metrics for record in records] == [True, True, False]
    assert records[0].metrics["diagnostics/gradient_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("methods", [[], ["scaffold", {"fedvg": {"granularity": "block"}}], ["fedacg", "moon"]])
def test_results_are_the_same_without(methods, root):
    plain = run(plan_of(root, methods, model=BATCH_NORM), root)
    watched = run(plan_of(root, [*methods, "diagnostics"], model=BATCH_NORM), root)
    assert watched.params_sha256() == plain.params_sha256()
    assert watched.counters == plain.counters
    assert watched.evaluate() == plain.evaluate()


def test_it_measures_when_asked(root):
    plan = plan_of(root, [{"diagnostics": {"every": 3}}], rounds=6, evaluation={"every": 2})
    _, records = measured(plan, root, rounds=6)
    assert [r.round_index for r in records if "diagnostics/drift" in r.metrics] == [0, 2, 5]
    assert [r.round_index for r in records if "diagnostics/intra" in r.metrics] == [5]
    assert [r.round_index for r in records if "diagnostics.singular_values" in r.arrays] == [5]


@pytest.mark.slow
def test_any_number_of_trainers_measures_the_same(root, ray_pools):
    measures = ["drift", "agreement", "spectrum", "features", "premise"]
    names = {"drift", "agreement_mean", "effective_rank", "accuracy_by_gradient", *FEATURES}
    plan = plan_of(root, [{"diagnostics": {"measures": measures}}], model=BATCH_NORM)

    def outcome(pool=None):
        server, records = measured(plan, root, 2, pool)
        metrics = [{k: v for k, v in r.metrics.items() if k.startswith("diagnostics/")} for r in records]
        assert set(metrics[0]) == {f"diagnostics/{name}" for name in names}
        return server.params_sha256(), metrics, records[-1].arrays["diagnostics.singular_values"].tolist()

    expected = outcome()
    assert [outcome(pool) for pool in ray_pools(plan)] == [expected] * 3


def test_slices_are_given_in_order_with_what_is_shared(root, ray_pools):
    plan = plan_of(root, ["diagnostics"], data={"test": 0.25})
    servers = [server_on(plan, root), *(server_on(plan, root, pool) for pool in ray_pools(plan))]
    for server in servers:
        server.pool.begin_round()
        call = partial(map_features, function=_rows_and_sum, shared=pack({"add": torch.ones(2)}))
        found = server.scorer.on_test(call, server.state, server.counters)
        wanted = slices_of("test", server.federation.num_test, 256)
        assert len(wanted) == 4
        labels = server_labels(servers[0])
        assert [rows for rows, _, _ in found] == [part.end - part.start for part in wanted]
        assert [first for _, first, _ in found] == [labels[part.start] for part in wanted]
        assert all(float(total) == 2.0 for _, _, total in found)


def server_labels(server):
    return server.pool._trainer.data.held_out("test").targets.tolist()


def _rows_and_sum(features, labels, shared):
    """Also writes to what is shared: the next slice must not see it."""
    assert len(features) == len(labels)
    total = shared["add"].sum()
    shared["add"] += 1
    return len(labels), int(labels[0]), total


def test_with_adapters_it_works(root):
    plan = lora_plan(root, ["livar", "diagnostics"], rounds=1, cohort={"size": 3})
    server, (record,) = measured(plan, root)
    columns = record.arrays["diagnostics.agreement:columns"].tolist()
    assert "head" in columns[-1]
    assert len(columns) == len([leaf for leaf in server.layout.params if len(leaf.shape) == 2])
    assert all(math.isfinite(v) for k, v in record.metrics.items() if k.startswith("diagnostics/"))


@pytest.mark.parametrize(
    ("methods", "measures", "reason"),
    [
        (["freeze"], ["spectrum"], "the classifier is frozen, personal or no matrix"),
        (["tests.support.toys:personal_head"], ["spectrum"], "the classifier is frozen, personal or no matrix"),
        (
            [{"tests.support.toys:personal_head": {"head": "conv"}}],
            ["features"],
            "layers below the classifier are personal",
        ),
        ([{"fedproto": {"share": "nothing"}}], ["drift"], "no parameter is shared"),
        ([{"fedproto": {"share": "nothing"}}], ["agreement"], "no linear or convolution layer is shared"),
        ([{"fedproto": {"share": "nothing"}}], ["layer_drift"], "no linear or convolution layer is shared"),
    ],
)
def test_what_the_global_model_lacks_is_refused(methods, measures, reason, root):
    with pytest.raises(ConfigError, match=reason):
        plan_of(root, [*methods, "diagnostics"])
    with pytest.raises(ConfigError, match=reason):
        plan_of(root, [*methods, {"diagnostics": {"measures": measures}}])
    others = [name for name in ("drift", "agreement", "spectrum", "features") if name not in measures]
    if methods != [{"fedproto": {"share": "nothing"}}]:
        _, (record,) = measured(plan_of(root, [*methods, {"diagnostics": {"measures": others}}]), root)
        assert [key for key in record.metrics if key.startswith("diagnostics/")]


def test_faults_name_the_remedy(root):
    with pytest.raises(ConfigError, match="put fisher before diagnostics"):
        plan_of(root, ["diagnostics", "fisher"])
    plan = plan_of(root, ["tests.methods.test_diagnostics:asks_without_need"])
    with pytest.raises(MethodError, match="map_features found no features"):
        server_on(plan, root).run_round(0)
