"""SCAFFOLD: control variates against client drift."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from methods.fednova import effective_steps
from methods.moments import mean_gradient
from raysim.base.conditions import applies_without
from raysim.core.layout import Layout
from raysim.core.method import Batch, ClientView, GradFn, Message, Method, Positive, ServerView, State, Vector, require


def scaffold(
    *,
    server_lr: Positive = 1.0,
    option: Annotated[Literal["i", "ii"], applies_without("as_in", "fl-bench")] = "ii",
    as_in: Literal["fl-bench", "niid-bench"] | None = None,
) -> Method:
    """Corrects every local gradient by control - control_i, estimates of the global and of the client's gradient.

    Karimireddy et al. 2020 (arXiv:1910.06378), Algorithm 1, with c the server's control and c_i the client's, both 0
    at first, K_i steps, s the broadcast point, N all clients and S those of the round:
        client:  y <- y - lr (g(y) + c - c_i)
                 option i:   c_i+ = gradient of the local loss at s
                 option ii:  c_i+ = c_i - c - (y_i - s) / (K_i lr)
        server:  w+ = w + server_lr mean_S (y_i - s),   c+ = c + (1/N) sum_S (c_i+ - c_i)
    Participants are averaged uniformly, unless a method that claims the weights (FedVG) replaces or mixes that average;
    c keeps its own 1/N. Option ii treats everything that moved y as gradient: weight decay, clipping, a pull of another
    method, and corrections of methods listed after scaffold. Under momentum rho, which the paper does not treat, K_i
    becomes the number of times that a gradient enters y_i, (K - rho (1 - rho^K) / (1 - rho)) / (1 - rho), as in
    FedNova; c_i+ is then a weighted mean of the local gradients; without momentum it is their mean. Buffers and
    personal leaves have no control. A client without a step keeps its c_i. With BatchNorm option i uses the statistics
    of evaluation.batch_size examples.

    `as_in: fl-bench` is the rule behind FedVG's tables: c_i is never stored, so it is 0 in every round and c grows like
    a sum of gradients; and K_i counts steps under momentum, too. The code also takes local_epoch batches instead of
    epochs (set local.steps). Left out: the code divides by the reduced number of a straggler's steps after taking all
    steps, gives BatchNorm statistics a control, and drops training batches with one example also without BatchNorm.

    `as_in: niid-bench` averages participants by their numbers of examples, as the benchmark's code does (Li et al.
    2022, arXiv:2102.02079). The code adds c - c_i outside of the momentum and divides by K lr, which is the same to
    first order: under momentum a step is 1 / (1 - rho) as long, and so are the code's controls. Left out: the code's
    controls begin at the weights of a random network, which cancel only if every client takes part in every round.

    Args:
      server_lr: server learning rate, > 0; 1 in the paper's experiments and in FedVG's tables.
      option: update of a client's control variate. "ii" is used in the paper's experiments; "i" costs one more pass
        over the local data.
      as_in: "fl-bench": the rule behind FedVG's tables, needs option ii; "niid-bench": participants are averaged by
        their numbers of examples.
    """
    keeps_control = as_in != "fl-bench"

    def init(params: Tensor, layout: Layout) -> State:
        return {"control": torch.zeros_like(params)}

    def broadcast(message: Message, state: State) -> Message:
        return Message(message.params, {"control": state["control"]})

    def report(client: ClientView) -> dict[str, Vector]:
        if client.num_steps == 0:
            return {"change": Vector(torch.zeros_like(client.start))}
        if option == "i":
            control_i_new = mean_gradient(client, client.start)
        else:
            steps = effective_steps(client.num_steps, momentum=client.momentum) if keeps_control else client.num_steps
            update, control = client.params - client.start, client.message["control"]
            control_i_new = new_control(control_of(client), control, update, num_steps=steps, client_lr=client.lr)
        client.layout.zero_personal_(control_i_new)
        change = control_i_new - control_of(client)
        if keeps_control:
            client.memory["control"] = control_i_new
        return {"change": Vector(change)}

    def server_update(update: Tensor, state: State, server: ServerView) -> tuple[Tensor, State]:
        # 1/N of the population, not of the round: c stays the mean of all clients' c_i.
        share = torch.full((len(server.clients),), 1 / server.population, dtype=torch.float64)
        change = server.total("change", {leaf.name: share for leaf in server.layout.params})
        control = state["control"] + change.float()
        server.log("control_norm", float(control.norm()))
        return server_lr * update, {"control": control}

    return Method(
        "scaffold",
        init=init,
        broadcast=broadcast,
        grads=corrected,
        report=report,
        server_update=server_update,
        needs=frozenset({"sgd", "client-memory"} if keeps_control else {"sgd"}),
        base_weights="examples" if as_in == "niid-bench" else "uniform",
    )


def control_of(client: ClientView) -> Tensor:
    """[num_params]: c_i, the client's control variate from its last round; 0 before its first."""
    control_i: Tensor | None = client.memory.get("control")
    return torch.zeros_like(client.start) if control_i is None else control_i


def corrected(inner: GradFn, client: ClientView) -> GradFn:
    """g(y) + c - c_i."""
    correction = client.message["control"] - control_of(client)

    def gradient(params: Tensor, batch: Batch) -> Tensor:
        return inner(params, batch).add_(correction)

    return gradient


def new_control(control_i: Tensor, control: Tensor, update: Tensor, *, num_steps: float, client_lr: float) -> Tensor:
    """Client control variate after a round.

    Karimireddy et al. 2020 (arXiv:1910.06378), Algorithm 1, option II:
        c_i+ = c_i - c + (x - y_i) / (K * eta_l),   update = y_i - x

    Args:
      control_i: [num_params], this client's variate before the round (zeros at first).
      control: [num_params], the server's variate sent with this round.
      update: [num_params], local - global.
      num_steps: K, optimizer steps taken: batches, not epochs; under momentum the number of `effective_steps`.
      client_lr: eta_l, constant over the round.
    Returns:
      [num_params]; inputs are not modified.
    Raises:
      ValueError: num_steps < 1 or client_lr <= 0.
    """
    require("new_control: num_steps", num_steps, num_steps >= 1, ">= 1", "drop clients without a batch")
    require("new_control: client_lr", client_lr, client_lr > 0, "> 0", "set local.lr")
    return (control_i - control).sub_(update, alpha=1 / (num_steps * client_lr))
