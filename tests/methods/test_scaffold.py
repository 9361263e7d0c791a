"""SCAFFOLD: property checks, FL-bench's rule, client memory between rounds and restarts."""

from __future__ import annotations

import pytest
import torch

from methods.scaffold import new_control, scaffold
from raysim.base.errors import ClientError, ConfigError
from raysim.core.method import Method
from raysim.engine.checkpoint import CheckpointStore
from raysim.plan.check import check
from raysim.running.runner import execute
from tests.support.federations import plan_of, raw_config, run, server_on
from tests.twins.by_hand import Quadratics, unlike_clients


def test_scaffold_round_0_is_uniform_averaging(root):
    """All variates are zero, so nothing is corrected yet."""
    expected = run(plan_of(root, ["uniform"]), root, rounds=1)
    assert run(plan_of(root, ["scaffold"]), root, rounds=1).params_sha256() == expected.params_sha256()
    assert run(plan_of(root, ["scaffold"]), root, rounds=2).params_sha256() != expected.params_sha256()


def test_scaffold_as_in_niid_bench_averages_by_examples(root):
    spec = {"scaffold": {"as_in": "niid-bench"}}
    runs = {name: run(plan_of(root, methods), root, rounds=1) for name, methods in (("mean", []), ("theirs", [spec]))}
    assert runs["theirs"].params_sha256() == runs["mean"].params_sha256()
    change, paper = (run(plan_of(root, [each]), root, rounds=1).method_state["scaffold"] for each in (spec, "scaffold"))
    assert torch.equal(change["control"], paper["control"])  # 1/N of the sum of changes, however many rows a client has


def test_control_i_is_the_mean_raw_gradient_along_the_path(root):
    plan = plan_of(
        root, ["tests.support.toys:remembers_gradients", "scaffold"], local={"epochs": 2}, cohort={"size": 5}
    )
    server = server_on(plan, root)
    for index in range(3):
        for client in server.run_round(index).clients["client"].tolist():
            memory = server.client_memory(client)
            control, mean = (memory[m][n] for m, n in (("scaffold", "control"), ("remembers_gradients", "mean")))
            assert abs(control - mean).max() < 1e-6
            assert abs(control).max() > 1e-2


@pytest.mark.parametrize("size", [5, 12])
@pytest.mark.parametrize("option", ["i", "ii"])
def test_control_is_the_mean_of_all_clients_controls(option, size, root):
    server = server_on(plan_of(root, [{"scaffold": {"option": option}}], cohort={"size": size}), root)
    for index in range(3):
        server.run_round(index)
        known = [torch.from_numpy(server.client_memory(c)["scaffold"]["control"].copy()) for c in server._memories]
        mean = sum(known) / 12  # of the population: those who have not trained yet have zero
        assert torch.allclose(server.method_state["scaffold"]["control"], mean, atol=1e-6)
        assert float(mean.norm()) > 1e-2


def test_identical_clients_need_no_correction():
    one = unlike_clients(1)
    same = {key: values * 4 for key, values in one.items()}
    corrected, plain = Quadratics(scaffold(), **same), Quadratics(Method("fedavg"), **same)
    for _ in range(5):
        corrected.round()
        plain.round()
        for memory in corrected.memory:
            assert torch.allclose(corrected.state["control"], memory["control"], atol=1e-6)
        assert torch.allclose(corrected.w, plain.w, atol=1e-6)


def test_scaffold_finds_the_optimum_that_fedavg_misses():
    clients = unlike_clients(4)
    distances = []
    for method in (scaffold(), Method("fedavg")):
        federation = Quadratics(method, **clients, steps=10)
        for _ in range(200):
            federation.round()
        distances.append(float((federation.w - federation.optimum([0.25] * 4)).norm()))
    assert distances[0] < 1e-5
    assert distances[1] > 1e-2


def test_control_grows_in_fl_benchs_rule_and_falls_in_the_papers():
    """A toy: partial participation, 40 rounds; c becomes a sum of gradients where c_i is not kept."""
    clients = unlike_clients(8)
    norms = {}
    for as_in in (None, "fl-bench"):
        federation, seen = Quadratics(scaffold(as_in=as_in), **clients, steps=2, lr=0.02), []
        generator = torch.Generator().manual_seed(0)
        for _ in range(40):
            federation.round(sorted(torch.randperm(8, generator=generator)[:2].tolist()))
            seen.append(federation.logged["control_norm"])
        norms[as_in] = seen
        assert all(("control" in memory) == (as_in is None) for memory in federation.memory)
    assert max(norms["fl-bench"]) > 3 * max(norms[None])
    assert norms["fl-bench"][9] > 2 * norms["fl-bench"][0]
    assert norms[None][-1] < max(norms[None]) / 2


def test_new_control_by_hand():
    got = new_control(
        torch.tensor([1.0, 2.0, 3.0]),
        torch.tensor([0.5, 0.5, 0.5]),
        torch.tensor([0.2, -0.4, 0.0]),
        num_steps=4,
        client_lr=0.1,
    )
    assert torch.allclose(got, torch.tensor([0.0, 2.5, 2.5]))
    with pytest.raises(ValueError, match="num_steps must be >= 1"):
        new_control(got, got, got, num_steps=0, client_lr=0.1)
    with pytest.raises(ValueError, match=r"set local\.lr"):
        new_control(got, got, got, num_steps=1, client_lr=0.0)


def twin_under_momentum(clients, *, rounds, steps, lr, rho, as_in=None):
    """(w, c) by loops: c_i+ is the mean of the raw gradients, each counted as often as it entered the client's steps."""
    count = len(clients["centres"])
    w, control = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    controls = [torch.zeros(3, dtype=torch.float64) for _ in range(count)]
    for _ in range(rounds):
        moves, changes = [], []
        for k in range(count):
            y, velocity, gradients = w.clone(), torch.zeros(3, dtype=torch.float64), []
            for _ in range(steps):
                gradients.append(clients["curvatures"][k] @ (y - clients["centres"][k]))
                velocity = rho * velocity + gradients[-1] + control - controls[k]
                y = y - lr * velocity
            shares = [sum(rho ** (later - step) for later in range(step, steps)) for step in range(steps)]
            new = sum(a * g for a, g in zip(shares, gradients, strict=True)) / sum(shares)
            if as_in:  # K lr whatever the momentum, and c_i = 0 for ever
                new = controls[k] - control - (y - w) / (steps * lr)
            moves.append(y - w)
            changes.append(new - controls[k])
            controls[k] = new if as_in is None else controls[k]
        w, control = w + sum(moves) / count, control + sum(changes) / count
    return w, control


@pytest.mark.parametrize("as_in", [None, "fl-bench"])
@pytest.mark.parametrize("rho", [0.0, 0.6, 0.9])
def test_scaffold_under_momentum_matches_its_twin(rho, as_in):
    clients = unlike_clients(4)
    federation = Quadratics(scaffold(as_in=as_in), **clients, steps=5, lr=0.02, momentum=rho)
    for _ in range(6):
        federation.round()
    w, control = twin_under_momentum(clients, rounds=6, steps=5, lr=0.02, rho=rho, as_in=as_in)
    # The server adds to c in float32, so the twins part by its rounding.
    assert float((federation.w - w).norm()) < 1e-5 * float(w.norm())
    assert float((federation.state["control"] - control).norm()) < 1e-5 * float(control.norm())
    assert float(control.norm()) > 1e-2


def test_scaffold_finds_the_optimum_under_momentum():
    federation = Quadratics(scaffold(), **unlike_clients(4), steps=10, lr=0.02, momentum=0.8)
    for _ in range(300):
        federation.round()
    assert float((federation.w - federation.optimum([0.25] * 4)).norm()) < 1e-5


def test_scaffold_runs_under_momentum_and_nothing_but_plain_or_momentum_sgd(root):
    assert plan_of(root, ["scaffold"], local={"momentum": 0.9}).methods
    with pytest.raises(ConfigError, match=r"scaffold needs sgd: set local\.optimizer to sgd"):
        plan_of(root, ["scaffold"], local={"optimizer": "adamw"})


def test_personal_leaves_have_no_control(root):
    server = run(plan_of(root, ["tests.support.toys:personal_head", "scaffold"]), root)
    for client in server._memories:
        control = torch.from_numpy(server.client_memory(client)["scaffold"]["control"].copy())
        values = server.layout.views(control)
        assert float(values["fc2.weight"].norm()) == float(values["fc2.bias"].norm()) == 0
        assert float(values["fc1.weight"].norm()) > 0
    assert float(server.layout.view(server.method_state["scaffold"]["control"], "fc2.weight").norm()) == 0


@pytest.mark.slow
def test_control_i_survives_rounds_and_restarts(root, tmp_path):
    """Stopped by a failure in round 2 and resumed in new objects: parameters and variates are those of an unbroken run."""

    def plan(name, marker):
        methods = ["scaffold", {"tests.support.toys:raises_once": {"round_index": 2, "marker": str(tmp_path / marker)}}]
        groups = {"rounds": 5, "cohort": {"size": 5}, "checkpoint": {"every_s": 0}}
        return check(raw_config(root, methods, name=name, storage=str(tmp_path), **groups), "a test")

    def play(a_plan):
        return execute(a_plan, on_start=lambda *_: None, on_round=lambda _: None)

    broken = plan("broken", "marker")
    with pytest.raises(ClientError, match="fails once"):
        play(broken)
    stopped_at = CheckpointStore(tmp_path / "broken" / "checkpoints").latest().next_round
    assert stopped_at == 2
    summary = play(broken)

    (tmp_path / "never").write_text("")
    whole_plan = plan("whole", "never")
    whole = play(whole_plan)
    assert summary["params_sha256"] == whole["params_sha256"]
    expected = run(whole_plan, root)
    assert expected.params_sha256() == whole["params_sha256"]
    for name in ("broken", "whole"):
        store = CheckpointStore(tmp_path / name / "checkpoints")
        memories = {client: store.read_memory(path) for client, path in store.latest().memories.items()}
        assert sorted(memories) == sorted(expected._memories)
        for client, memory in memories.items():
            kept = expected.client_memory(client)["scaffold"]["control"]
            assert (memory["scaffold"]["control"] == kept).all()
            assert abs(kept).max() > 0
