"""Asynchronous methods against naive event loops, and their limit cases."""

from __future__ import annotations

import copy
import csv
import heapq

import numpy as np
import pytest

from raysim.base.errors import ConfigError, RaysimError
from raysim.core.cohorts import choose_cohort
from raysim.core.seeding import derive_seed
from raysim.engine.checkpoint import CheckpointStore
from raysim.engine.simulation import restore
from tests.support.federations import plan_of, run, server_on, steps_plan
from tests.twins.federation import Naive, assert_same_state

COLUMNS = ("client", "step_s", "down_mbps", "up_mbps", "latency_s")


def traces(path, count=12, seed=0):
    """A file of traces; return name -> values."""
    rng = np.random.default_rng(seed)
    rows = [[c, *np.round(rng.lognormal(size=4), 3)] for c in rng.permutation(count)]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return {int(row[0]): dict(zip(COLUMNS[1:], row[1:], strict=True)) for row in rows}


class EventLoop(Naive):
    """Clients train when they begin, and their models wait for the time at which they arrive."""

    def begin(self, speed, at_work):
        self.speed, self.at_work, self.heap, self.now = speed, at_work, [], 0.0
        floats = [v for v in self.model.state_dict().values() if v.is_floating_point()]
        self.megabits = 8e-6 * 4 * sum(v.numel() for v in floats)

    def step(self, index, arrivals):
        """(client, staleness, model, the model that it began with) of each update of a server step, by client."""
        arrived = []
        while len(arrived) < arrivals:
            busy = {entry[1] for entry in self.heap} | {entry[1] for entry in arrived}
            free = [c for c in range(self.config.partition.num_clients) if c not in busy]
            count = min(self.at_work - len(self.heap), len(free))
            if count > 0:
                seed = derive_seed(self.config.seed, "begin", index, len(arrived)) if arrived else self.config.seed
                for place in choose_cohort(len(free), count, seed=seed, round_index=index):
                    client = free[place]
                    model, steps = self.local(client, index)
                    own = self.speed[client]
                    took = 2 * own["latency_s"] + steps * own["step_s"]
                    took += self.megabits / own["down_mbps"] + self.megabits / own["up_mbps"]
                    heapq.heappush(self.heap, (self.now + took, client, index, model, copy.deepcopy(self.model)))
            arrived.append(heapq.heappop(self.heap))
            self.now = arrived[-1][0]
        return [(c, index - begun, model, base) for _, c, begun, model, base in sorted(arrived, key=lambda e: e[1])]


class FedBuff(EventLoop):
    """x <- x + eta_g / K sum_k (1 + tau_k)^-0.5 (x_k - x_tau_k)."""

    def server_steps(self, num_steps, buffer, server_lr, power):
        for index in range(num_steps):
            state, total = self.model.state_dict(), {}
            for _, tau, model, base in self.step(index, buffer):
                for name, value in base.state_dict().items():
                    if value.is_floating_point():
                        moved = (model.state_dict()[name].double() - value.double()) * (1 + tau) ** -power / buffer
                        total[name] = total.get(name, 0) + moved
            for name, change in total.items():
                lr = server_lr if name in dict(self.model.named_parameters()) else 1.0
                state[name].copy_((state[name].double() + lr * change).float())


class FedAsync(EventLoop):
    """x <- (1 - a) x + a x_k, a = alpha (1 + tau)^-power."""

    def server_steps(self, num_steps, alpha, power):
        for index in range(num_steps):
            ((_, tau, model, base),) = self.step(index, 1)
            a, state = alpha * (1 + tau) ** -power, self.model.state_dict()
            for name, value in state.items():
                new = model.state_dict()[name].double()
                if name in dict(self.model.named_parameters()):
                    value.copy_(((1 - a) * value.double() + a * new).float())
                elif value.is_floating_point():
                    value.copy_((value.double() + a * (new - base.state_dict()[name].double())).float())


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_fedbuff_matches_an_event_loop(root, tmp_path, norm):
    speed = traces(tmp_path / "traces.csv")
    options, groups = {"buffer": 3, "server_lr": 0.8, "power": 0.7}, {"model": {"norm": norm}, "rounds": 7}
    plan = plan_of(root, [{"fedbuff": options}], time={"traces": str(tmp_path / "traces.csv")}, **groups)
    naive = FedBuff(plan)
    naive.begin(speed, plan.config.cohort_size)
    naive.server_steps(7, *options.values())
    server = run(plan, root)
    assert server.timetable.now_s == pytest.approx(naive.now, rel=1e-12)
    assert_same_state(server, naive)


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_fedasync_matches_an_event_loop(root, tmp_path, norm):
    speed = traces(tmp_path / "traces.csv", seed=1)
    groups = {"model": {"norm": norm}, "rounds": 10, "cohort": {"size": 4}}
    plan = plan_of(
        root,
        [{"fedasync": {"alpha": 0.8, "power": 0.3}}, {"fedprox": {"mu": 0.3}}],
        time={"traces": str(tmp_path / "traces.csv")},
        **groups,
    )
    naive = FedAsync(plan, mu=0.3)
    naive.begin(speed, 4)
    naive.server_steps(10, 0.8, 0.3)
    server = run(plan, root)
    assert server.timetable.now_s == pytest.approx(naive.now, rel=1e-12)
    assert_same_state(server, naive)


def test_fedbuff_with_equal_speeds_and_the_whole_cohort_as_buffer_is_fedavg(root):
    options = {"buffer": 7, "power": 0.0, "by_examples": True}
    plan = steps_plan(root, [{"fedbuff": options}], steps=3, time={"step_s": 0.5})
    server = run(plan, root)
    assert server.params_sha256() == run(steps_plan(root, steps=3), root).params_sha256()
    assert server.timetable.now_s == plan.num_rounds * 3 * 0.5
    stale = run(steps_plan(root, [{"fedbuff": options | {"buffer": 3}}], steps=3, time={"step_s": 0.5}), root)
    assert stale.params_sha256() != server.params_sha256()


def test_simulated_time_alone_changes_no_result(root):
    server = run(plan_of(root, ["fedvg"], time={"step_s": 2.0, "up_mbps": 1.0}), root)
    assert server.params_sha256() == run(plan_of(root, ["fedvg"]), root).params_sha256()


def test_bytes_of_a_method_take_simulated_time(root):
    clock = {"step_s": 0.0, "up_mbps": 1.0}
    dense, sparse = (
        server_on(plan_of(root, methods, time=clock), root) for methods in ([], [{"top_k": {"share": 0.1}}])
    )
    for server in (dense, sparse):
        record = server.run_round(0)
        up_mb = record.metrics["comm/up_mb"] / len(record.clients["client"])
        assert record.metrics["time/simulated_s"] == pytest.approx(8 * up_mb)
    assert sparse.timetable.now_s < 0.5 * dense.timetable.now_s


def test_a_round_after_its_deadline_without_anybody_is_a_round_of_nobody(root):
    server = server_on(plan_of(root, time={"step_s": 1.0, "deadline_s": 0.5}), root)
    before = server.params_sha256()
    record = server.run_round(0)
    assert (record.metrics["clients/late"], record.metrics["time/simulated_s"]) == (7, 0.5)
    assert server.params_sha256() == before


def test_over_selection_downloads_to_all_who_begin(root):
    plain, over = (
        server_on(plan_of(root, time={"step_s": {"lognorm": {"s": 1}}} | more), root).run_round(0)
        for more in ({}, {"over_selection": 1.5})
    )
    assert len(over.clients["client"]) == 7
    assert over.metrics["clients/late"] == 4  # 7 * 1.5, rounded up, are 11
    assert over.metrics["comm/down_mb"] == pytest.approx(plain.metrics["comm/down_mb"] * 11 / 7)


@pytest.mark.parametrize("methods", [[{"fedbuff": {"buffer": 2}}, {"top_k": {"share": 0.2}}], ["fedasync", "scaffold"]])
def test_a_resumed_asynchronous_run_has_the_same_bits(root, tmp_path, methods):
    plan = plan_of(root, methods, rounds=8, cohort={"size": 5})
    whole = run(plan, root)
    first, store = run(plan, root, rounds=4), CheckpointStore(tmp_path)
    memories = ((client, first.client_memory(client)) for client in first.changed_clients())
    store.save(4, first.snapshot(), memories)
    assert len(first.turns.state()["sent"]) <= len(first.timetable.flights)  # models that nobody needs are gone
    again = server_on(plan, root)
    restore(again, store.latest(), store)
    for index in range(4, 8):
        again.run_round(index)
    assert again.params_sha256() == whole.params_sha256()
    assert (again.timetable.now_s, again.timetable.flights) == (whole.timetable.now_s, whole.timetable.flights)


def test_a_run_does_not_resume_with_other_speeds(root, tmp_path):
    clock = {"traces": str(tmp_path / "traces.csv")}
    traces(tmp_path / "traces.csv")
    first = run(plan_of(root, ["fedasync"], time=clock), root, rounds=1)
    traces(tmp_path / "traces.csv", seed=1)
    with pytest.raises(RaysimError, match="the speeds of the clients changed"):
        server_on(plan_of(root, ["fedasync"], time=clock), root).restore(first.snapshot())


def refusal(root, methods=(), **groups):
    with pytest.raises(ConfigError) as error:
        plan_of(root, methods, **groups)
    return str(error.value)


def test_asynchronous_methods_are_refused_beside_what_waits_for_a_cohort(root):
    assert "set time.step_s" in refusal(root, ["fedbuff"], time=None)
    assert "10 updates, and 7 clients" in refusal(root, ["fedbuff"])
    fits = [{"fedbuff": {"buffer": 2}}]
    assert "time.deadline_s: has no effect with fedbuff" in refusal(root, fits, time={"deadline_s": 3})
    assert "poisson" in refusal(root, fits, cohort={"size": 7, "sampling": "poisson"})
    assert "no client trains after the others" in refusal(root, [*fits, {"alie": {"share": 0.3}}])
    assert "both decide arrivals" in refusal(root, [*fits, "fedasync"])


def test_dp_is_refused_beside_what_changes_how_often_clients_take_part(root):
    dp = {"dp": {"clip": 1.0, "noise": 1.0}}
    assert "methods: fedbuff changes how often" in refusal(root, [{"fedbuff": {"buffer": 2}}, dp])
    for key, value in {"over_selection": 1.5, "available": [0.5] * 24}.items():
        assert f"time.{key}: changes how often" in refusal(root, [dp], time={key: value})


@pytest.mark.parametrize(
    ("clock", "text"),
    [
        ({"step_s": {"lognrm": {}}}, "time.step_s: unknown distribution 'lognrm'"),
        ({"step_s": {"lognorm": {"sigma": 1}}}, "lognorm has other options"),
        ({"step_s": {"norm": {}}}, "time.step_s: step_s of client"),
        ({"up_mbps": 0}, "time.up_mbps: up_mbps of client 0 is 0; it must be > 0"),
        ({"available": [0.5]}, "must be 24 numbers"),
        ({"traces": "nowhere.csv"}, "time.traces: cannot be read"),
    ],
)
def test_faults_of_the_clock_are_refused_in_a_sentence(root, clock, text):
    assert text in refusal(root, time=clock)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("client,speed\n0,1\n", "has a column 'speed'"),
        ("client,step_s\n0,1\n0,2\n", "each of 0, ..., 11 once"),
        ("client,step_s\n0,x\n", "cannot be read"),
    ],
)
def test_faults_of_a_file_of_traces_are_refused_in_a_sentence(root, tmp_path, content, text):
    (tmp_path / "t.csv").write_text(content)
    assert text in refusal(root, time={"traces": str(tmp_path / "t.csv")})
