"""A federation of quadratic clients on three parameters, driven by a method's hooks without the engine."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from raysim.core.layout import layout_of
from raysim.core.method import Message
from raysim.core.weights import normalised

LAYOUT = layout_of(nn.Linear(3, 1, bias=False), head="none")
(LEAF,) = LAYOUT.params


class Quadratics:
    """Clients f_k(y) = (y - b_k)' A_k (y - b_k) / 2 with n_k examples, in float64.

    Attributes:
      w: [3], the global model; memory, state: of the method; updates: of the last round, in the order of its clients.
      weights: what the last round added the updates with.
    """

    def __init__(self, method, *, curvatures, centres, sizes=None, steps=5, lr=0.1, momentum=0.0):
        self.method, self.curvatures, self.centres = method, curvatures, centres
        count = len(centres)
        self.sizes = torch.tensor(sizes or [1] * count)
        self.steps = [steps] * count if isinstance(steps, int) else steps
        self.lr, self.momentum = lr, momentum
        self.w = torch.zeros(3, dtype=torch.float64)
        self.memory = [{} for _ in range(count)]
        self.state = method.init(self.w.clone(), LAYOUT) if method.init else {}
        self.logged = {}

    def gradient(self, client, y):
        return self.curvatures[client] @ (y - self.centres[client])

    def client(self, index, message):
        return SimpleNamespace(
            start=message.params,
            params=message.params.clone(),
            message=message.fields,
            memory=self.memory[index],
            layout=LAYOUT,
            lr=self.lr,
            momentum=self.momentum,
            num_steps=0,
        )

    def train(self, index, message):
        """(update, report) of one client."""
        view = self.client(index, message)

        def plain(y, batch):
            return self.gradient(index, y)

        gradient = self.method.grads(plain, view) if self.method.grads else plain
        velocity = torch.zeros(3, dtype=torch.float64)
        for _ in range(self.steps[index]):
            velocity = self.momentum * velocity + gradient(view.params, None)
            view.params = view.params - self.lr * velocity
            view.num_steps += 1
        report = self.method.report(view) if self.method.report else {}
        return view.params - view.start, report

    def round(self, cohort=None):
        cohort = list(range(len(self.centres))) if cohort is None else cohort
        message = Message(self.w.clone(), {})
        if self.method.broadcast:
            message = self.method.broadcast(message, self.state)
        trained = [self.train(index, message) for index in cohort]
        self.updates = torch.stack([update for update, _ in trained])
        reports = [report for _, report in trained]

        def total(name, weights):
            rows = self.updates if name == "update" else torch.stack([report[name].value for report in reports])
            return (weights[LEAF.name][:, None] * rows).sum(0)

        steps = torch.tensor([self.steps[index] for index in cohort])
        scores = torch.ones(len(cohort)) if self.method.base_weights == "uniform" else self.sizes[cohort]
        server = SimpleNamespace(
            population=len(self.centres),
            clients=torch.tensor(cohort),
            num_steps=steps,
            is_active=steps > 0,
            layout=LAYOUT,
            start=message.params,
            total=total,
            report={name: torch.stack([r[name] for r in reports]) for name in reports[0] if name == "effective_steps"},
            log=lambda name, value, columns=(): self.logged.update({name: value}),
        )
        weights = {LEAF.name: normalised(scores.double())}
        server.weights = self.method.weigh(weights, server) if self.method.weigh else weights
        update = total("update", server.weights)
        if self.method.server_update:
            update, self.state = self.method.server_update(update, self.state, server)
        self.w = self.w + update

    def optimum(self, weights):
        """Where the weighted mean of the clients' gradients is zero."""
        a = sum(p * c for p, c in zip(weights, self.curvatures, strict=True))
        b = sum(p * c @ m for p, c, m in zip(weights, self.curvatures, self.centres, strict=True))
        return torch.linalg.solve(a, b)


def unlike_clients(count, seed=0):
    """curvatures, centres: positive definite and scattered."""
    generator = torch.Generator().manual_seed(seed)
    roots = torch.randn(count, 3, 3, generator=generator, dtype=torch.float64)
    curvatures = [0.3 * root @ root.T + 0.5 * torch.eye(3, dtype=torch.float64) for root in roots]
    return {"curvatures": curvatures, "centres": list(torch.randn(count, 3, generator=generator, dtype=torch.float64))}
