"""Methods with a model of each client's own, against naive federations, and their limit cases."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import raysim
from raysim.base.errors import ConfigError, DataError
from raysim.core.seeding import derive_seed, torch_generator
from tests.support.federations import plan_of, probe, run, server_on, server_with
from tests.twins.federation import Naive, assert_close, assert_same_state

LOCALS = {"lr": 0.05, "lr_decay": 0.9}


class Own(Naive):
    """FedAvg that keeps a model of each client's own; `own` holds client -> module."""

    def __init__(self, plan, **options):
        super().__init__(plan)
        self.own, self.options = {}, options
        self.begin()

    def begin(self):
        """Set up what the client memory holds."""

    def loss_gradient(self, model, x, y):
        """Gradients of a batch at a model, which stays as it is, statistics of BatchNorm included."""
        trial = copy.deepcopy(model)
        return torch.autograd.grad(F.cross_entropy(trial(x), y), list(trial.parameters()))

    def moved(self, model, step, gradients):
        """A copy of a model, moved by step times the gradients."""
        after = copy.deepcopy(model)
        with torch.no_grad():
            for p, g in zip(after.parameters(), gradients, strict=True):
                p += step * g
        return after

    def trained(self, model, client, round_index, lr, num_steps=None, pull=0.0, only=""):
        """A copy of a model after local steps in a batch order of its own.

        pull: towards the global model; only: how the names of the trained parameters begin.
        """
        local = self.config.local
        model = copy.deepcopy(model).train()
        anchor = [p.detach().clone() for p in self.model.parameters()]
        rows = self.plan.manifest.clients[client]
        generator = torch_generator(derive_seed(self.config.seed, "own_model", round_index, client))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=local.momentum, weight_decay=local.weight_decay)
        per_epoch = -(-len(rows) // local.batch_size)
        left = num_steps or int(local.epochs) * per_epoch
        while left:
            order = torch.randperm(len(rows), generator=generator).numpy()
            for start in range(0, len(rows), local.batch_size)[:left]:
                x, y = self.batch(rows[order[start : start + local.batch_size]])
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                for p, a in zip(model.parameters(), anchor, strict=True):
                    p.grad += pull * (p.detach() - a)
                for name, p in model.named_parameters():
                    p.grad *= name.startswith(only)
                optimizer.step()
                left -= 1
        return model


class FineTune(Own):
    def finish(self, client, round_index, model, anchor, steps, lr):
        self.own[client] = self.trained(self.model, client, round_index, self.options["lr"], self.options["steps"])


class Ditto(Own):
    def finish(self, client, round_index, model, anchor, steps, lr):
        begin = self.own.get(client, self.model)
        self.own[client] = self.trained(begin, client, round_index, lr, pull=self.options["lam"])


class Steps(Own):
    """Own local steps: `gradients(client, model, x, y)` in the place of the loss's."""

    def local(self, client, round_index):
        self.now = round_index
        rows, local = self.plan.manifest.clients[client], self.config.local
        model = copy.deepcopy(self.model).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr(round_index))
        generator = torch_generator(derive_seed(self.config.seed, "batches", round_index, client))
        order = torch.randperm(len(rows), generator=generator).numpy()
        self.step = 0
        for start in range(0, len(rows), local.batch_size):
            x, y = self.batch(rows[order[start : start + local.batch_size]])
            gradients = self.gradients(client, model, x, y)
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.grad = g
            optimizer.step()
            self.step += 1
        self.finish(client, round_index, model, None, self.step, self.lr(round_index))
        return model, self.step


class PFedMe(Steps):
    def gradients(self, client, model, x, y):
        lam, inner_lr = self.options["lam"], self.options["inner_lr"]
        theta = copy.deepcopy(model)
        for _ in range(self.options["inner_steps"]):
            gradients = self.loss_gradient(theta, x, y)
            pulled = [
                g + lam * (t - w) for g, t, w in zip(gradients, theta.parameters(), model.parameters(), strict=True)
            ]
            theta = self.moved(theta, -inner_lr, pulled)
        self.own[client] = theta
        pairs = zip(model.parameters(), theta.parameters(), strict=True)
        return [lam * (w - t).detach() for w, t in pairs]


class Apfl(Steps):
    def begin(self):
        self.local_models, self.shares = {}, {}

    def mixture(self, share, local, model):
        return self.moved(self.moved(local, share - 1, local.parameters()), 1 - share, model.parameters())

    def gradients(self, client, model, x, y):
        lr = self.lr(self.now)
        local = self.local_models.setdefault(client, copy.deepcopy(self.model))
        share = self.shares.setdefault(client, self.options["alpha"])
        at_mixture = self.loss_gradient(self.mixture(share, local, model), x, y)
        if self.options["adaptive"] and self.step == 0:
            triples = zip(at_mixture, local.parameters(), model.parameters(), strict=True)
            slope = sum(float((g * (v - w)).sum().detach()) for g, v, w in triples)
            self.shares[client] = min(1.0, max(0.0, share - lr * slope))
        self.local_models[client] = self.moved(local, -lr * share, at_mixture)
        return self.loss_gradient(model, x, y)

    def finish(self, client, round_index, model, anchor, steps, lr):
        self.own[client] = self.mixture(self.shares[client], self.local_models[client], model)


class PerFedAvg(Steps):
    def gradients(self, client, model, x, y):
        alpha, delta = self.options["alpha"], self.options.get("delta")
        count = 2 if delta is None else 3
        whole = len(y) < 2 * count
        parts = [(x, y)] * count if whole else [*zip(x.tensor_split(count), y.tensor_split(count), strict=True)]
        ahead = self.moved(model, -alpha, self.loss_gradient(model, *parts[0]))
        meta = self.loss_gradient(ahead, *parts[1])
        if delta is None:
            return meta
        up, down = (self.loss_gradient(self.moved(model, s * delta, meta), *parts[2]) for s in (1, -1))
        return [m - alpha * (u - d) / (2 * delta) for m, u, d in zip(meta, up, down, strict=True)]

    def finish(self, client, round_index, model, anchor, steps, lr):
        self.own[client] = self.trained(self.model, client, round_index, self.options["alpha"], 1)


class Body(Steps):
    """FedBABU."""

    def gradients(self, client, model, x, y):
        names = [name for name, _ in model.named_parameters()]
        gradients = zip(names, self.loss_gradient(model, x, y), strict=True)
        return [torch.zeros_like(g) if name.startswith("fc2.") else g for name, g in gradients]

    def finish(self, client, round_index, model, anchor, steps, lr):
        self.own[client] = self.trained(self.model, client, round_index, lr, self.options["steps"])


class Rep(Steps):
    """FedRep; `heads` holds client -> classifier."""

    def begin(self):
        self.heads = {}

    def local(self, client, round_index):
        common = self.model
        self.model = copy.deepcopy(common)
        self.model.load_state_dict(self.heads.get(client, {}), strict=False)
        epochs, lr = self.options["head_epochs"], self.lr(round_index)
        num_steps = round(epochs * -(-len(self.plan.manifest.clients[client]) // self.config.local.batch_size))
        head = self.trained(self.model, client, round_index, lr, num_steps, only="fc2.").state_dict()
        self.heads[client] = {name: value for name, value in head.items() if name.startswith("fc2.")}
        self.model.load_state_dict(self.heads[client], strict=False)
        model, steps = super().local(client, round_index)
        self.own[client], self.model = copy.deepcopy(model), common
        model.fc2.load_state_dict(common.fc2.state_dict())  # not sent
        return model, steps

    gradients = Body.gradients


class Ala(Own):
    """FedALA; `mixing` holds client -> name of an entry of fc1 or fc2 -> weights."""

    def begin(self):
        self.mixing = {}

    def mixed(self, client, round_index):
        theta, own = copy.deepcopy(self.model), dict(self.own[client].named_parameters())
        common = dict(self.model.named_parameters())
        top = {name: p for name, p in theta.named_parameters() if name.startswith(("fc1.", "fc2."))}
        passes = 1 if client in self.mixing else self.options["first_passes"]
        weights = self.mixing.setdefault(client, {name: torch.ones_like(p) for name, p in top.items()})
        size = self.config.evaluation.batch_size
        batches = self.pass_rows(client)
        batches = [batches[start : start + size] for start in range(0, len(batches), size)]
        generator = torch_generator(derive_seed(self.config.seed, "method/fedala", round_index, client))
        count = -(-len(batches) * self.options["tenths"] // 10)

        def mix():
            with torch.no_grad():
                for name, p in top.items():
                    p.copy_(own[name] + weights[name] * (common[name] - own[name]))

        for _ in range(passes):
            for index in torch.randperm(len(batches), generator=generator)[:count].tolist():
                mix()
                gradients = self.loss_gradient(theta, *self.batch(batches[index]))
                for (name, _), g in zip(theta.named_parameters(), gradients, strict=True):
                    if name in top:
                        moved = weights[name] - self.options["eta"] * g * (common[name] - own[name]).detach()
                        weights[name] = moved.clamp(0, 1)
        mix()
        return theta

    def local(self, client, round_index):
        common = self.model
        self.model = self.mixed(client, round_index) if client in self.own else common
        model, steps = super().local(client, round_index)
        self.own[client], self.model = copy.deepcopy(model), common
        return model, steps


#: Case -> (its method, its twin).
CASES = {
    "fine_tune": ({"steps": 3, "lr": 0.02}, FineTune),
    "ditto": ({"lam": 0.7}, Ditto),
    "pfedme": ({"lam": 8.0, "inner_steps": 3, "inner_lr": 0.05}, PFedMe),
    "apfl": ({"alpha": 0.3, "adaptive": False}, Apfl),
    "apfl-adaptive": ({"alpha": 0.3, "adaptive": True}, Apfl),
    "per_fedavg": ({"alpha": 0.05}, PerFedAvg),
    "per_fedavg-hessian": ({"alpha": 0.05, "delta": 0.02}, PerFedAvg),
    "fedbabu": ({"steps": 2}, Body),
    "fedrep": ({"head_epochs": 2.0}, Rep),
    "fedala": ({"layers": 2, "eta": 3.0, "share": 0.7, "first_passes": 2}, partial(Ala, tenths=7)),
}


@pytest.mark.parametrize("case", CASES)
def test_global_and_own_models_are_the_twins_after_3_rounds(case, root):
    options, twin = CASES[case]
    groups = {
        "partition": {"num_clients": 5},
        "data": {"test": 0.8},
        "cohort": {"size": 3},
        "evaluation": {"batch_size": 16},
    }  # few rows, and clients come again
    plan = plan_of(root, [{case.partition("-")[0]: options}], local=LOCALS, **groups)
    own = {}
    server, naive = server_with_own_models(plan, root, own), twin(plan, **options)
    for index in range(3):
        server.run_round(index)
        naive.round(index)
    assert_same_state(server, naive)
    assert own.keys() == naive.own.keys()
    for client, model in naive.own.items():
        got = server.layout.views(own[client])
        for name, value in model.state_dict().items():
            moved = got[name] - naive.begun[name]
            assert_close(moved, value - naive.begun[name], 2e-4, (client, name))


def server_with_own_models(plan, root, own):
    """A server whose trainer writes the clients' own models to `own`."""
    server = server_on(plan, root)
    trainer = server.pool._trainer
    score = trainer._personal_score

    def seen(client, state):
        own[client] = state.clone()
        return score(client, state)

    trainer._personal_score = seen
    return server


@pytest.mark.parametrize(
    ("methods", "same_as"),
    [
        (["fine_tune"], []),
        (["ditto"], []),
        ([{"apfl": {"alpha": 0.5}}], []),
        (["fine_tune", "fedprox"], ["fedprox"]),
        (["ditto", "fedvg", "top_k"], ["fedvg", "top_k"]),
    ],
)
def test_the_global_model_trains_as_without_own_models(methods, same_as, root):
    assert run(plan_of(root, methods), root).params_sha256() == run(plan_of(root, same_as), root).params_sha256()


def test_the_pull_of_ditto_holds_own_models_near_the_global_model(root):
    own = {lam: {} for lam in (0, 9.0)}
    for lam, models in own.items():
        server = server_with_own_models(plan_of(root, [{"ditto": {"lam": lam}}]), root, models)
        begun = server.state.clone()
        server.run_round(0)
    for client, state in own[0].items():
        assert float((own[9.0][client] - begun).norm()) < 0.9 * float((state - begun).norm())


def test_own_models_are_scored_and_kept(root):
    server = server_on(plan_of(root, ["ditto"], cohort={"size": 3}), root)
    metrics = server.run_round(0).metrics
    assert 0 < metrics["clients/expected_personal_accuracy_mean"] <= 1
    kept = sorted(server._memories)
    assert len(kept) == 3, "nothing is stored for clients that were not drawn"
    own = [torch.from_numpy(server.client_memory(client)["ditto"]["own_model"]) for client in kept]
    assert all(state.shape == server.state.shape for state in own)
    assert not torch.equal(own[0], own[1])


@pytest.mark.slow
def test_training_aside_leaves_the_client_alone(root):
    """BatchNorm's statistics and counters, dropout's draws, the gradient and the loss of the local steps."""
    states = {}
    for name, own_model in {"with": lambda client: client.train(client.start_state, steps=2), "without": None}.items():
        model = {"name": "mobilenetv2", "stem": "small", "width": 0.25, "dropout": 0.3}
        groups = {"model": model, "local": {"momentum": 0.5}, "cohort": {"size": 2}}
        server = server_with(root, probe(own_model=own_model), **groups)
        loss = [server.run_round(index).metrics["train/loss"] for index in range(2)]
        states[name] = (server.params_sha256(), loss, server.counters)
    assert states["with"] == states["without"]


@pytest.mark.parametrize("method", ["ditto", "personal"])
def test_the_network_of_a_client_can_be_loaded_from_a_finished_run(method, settings):
    result = raysim.run(settings, methods=[method], quiet=True)
    client = int(result.clients["client"].iloc[-1])
    mine, common = (dict(result.model(**which).named_parameters()) for which in ({"client": client}, {}))
    apart = {name for name, value in mine.items() if not torch.equal(value, common[name])}
    assert apart == (set(mine) if method == "ditto" else {"fc2.weight", "fc2.bias"})
    with pytest.raises(DataError, match="client 77 keeps no weights"):
        result.model(client=77)


@pytest.mark.parametrize(("method", "count"), [("fine_tune", 1), ("ditto", 2)])
def test_an_own_model_that_is_not_kept_is_made_only_to_be_scored(method, count, root, monkeypatch):
    server = server_on(plan_of(root, [method], cohort={"size": 1}, evaluation={"every": 2}), root)
    calls = []
    stack = server.pool._trainer.phases[0].stack
    monkeypatch.setattr(stack, "methods", [replace(m, own_model=counted(m.own_model, calls)) for m in stack.methods])
    scored = ["clients/expected_personal_accuracy_mean" in server.run_round(index).metrics for index in range(2)]
    assert (len(calls), scored) == (count, [False, True])


def counted(function, calls):
    def call(client):
        calls.append(client.id)
        return function(client)

    return call


def test_two_methods_with_own_models_are_refused(root):
    with pytest.raises(ConfigError, match="ditto and fine_tune both decide own-model"):
        plan_of(root, ["ditto", "fine_tune"])


def test_fedala_learns_weights_in_0_to_1_of_the_last_layers_alone(root):
    groups = {"partition": {"num_clients": 5}, "cohort": {"size": 5}, "data": {"test": 0.8}}
    server = run(plan_of(root, [{"fedala": {"eta": 100.0}}], rounds=2, **groups), root)
    weights = torch.from_numpy(server.client_memory(0)["fedala"]["weights"])
    head = [leaf for leaf in server.layout.params if leaf.layer == "fc2"]
    assert len(weights) == sum(leaf.size for leaf in head)
    assert (weights.min(), weights.max()) == (0.0, 1.0)
    assert 0 < (weights == 1).float().mean() < 1
