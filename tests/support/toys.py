"""Toy methods: short versions of methods that stress each hook, run through the real engine (design D.8)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import torch

from raysim.core.method import Method, Partition
from raysim.core.weights import RightMap


def remembers_gradients():
    """Keeps the mean gradient of the round, as methods before it in the list left it."""

    def grads(inner, client):
        total = client.scratch["total"] = torch.zeros_like(client.start)

        def gradient(params, batch):
            grad = inner(params, batch)
            total.add_(grad)
            return grad

        return gradient

    def report(client):
        client.memory["mean"] = client.scratch["total"] / client.num_steps
        return {}

    return Method("remembers_gradients", grads=grads, report=report, needs=frozenset({"client-memory"}))


def regmean(*, head: str = "fc2"):
    """A linear map as a client's weight on the head: W = (sum W_k G_k)(sum G_k)^-1."""

    def report(client):
        gram = 0
        for batch in client.batches():
            z = client.model.apply(client.params, batch.inputs).features.double()
            gram = gram + z.T @ z
        return {"gram": gram}

    def weigh(weights, server):
        gram = server.report["gram"] + 1e-3 * torch.eye(server.report["gram"].shape[1], dtype=torch.float64)
        maps = gram @ torch.linalg.inv(gram.sum(0))
        return {**weights, f"{head}.weight": RightMap(maps)}

    return Method(
        "regmean",
        report=report,
        weigh=weigh,
        claims=frozenset({f"weights:{head}.weight"}),
        needs=frozenset({"features"}),
    )


def personal_head(*, head: str = "fc2"):
    """The head is trained but never shared."""

    def partition(part: Partition):
        return Partition(part.trained, frozenset(n for n in part.shared if not n.startswith(head)), part.head)

    return Method("personal_head", partition=partition)


def spy():
    """Keeps the final weights in its server state, so that tests can look at them."""

    def server_update(update, state, server):
        return update, {"weights": dict(server.weights), "report": dict(server.report)}

    return Method("spy", server_update=server_update)


def criterion(*, scale: float = 1.0):
    """Claims the base loss."""
    return Method("criterion", loss=lambda inner, client: inner, claims=frozenset({"criterion"}))


def other_criterion():
    """Claims the base loss too."""
    return Method("other_criterion", loss=lambda inner, client: inner, claims=frozenset({"criterion"}))


def raises(*, client: int, round_index: int):
    """One client raises in one round."""

    def report(view):
        if view.id == client and view.round_index == round_index:
            raise ZeroDivisionError("the toy divides by zero")
        return {}

    return Method("raises", report=report)


def raises_once(*, round_index: int, marker: str):
    """A client raises in one round, unless the marker's file is there already."""

    def report(view):
        path = Path(marker)
        if view.round_index == round_index and not path.exists():
            path.write_text("")
            raise ArithmeticError("the toy fails once")
        return {}

    return Method("raises_once", report=report)


def out_of_memory(*, client: int, folder: str, times: int):
    """The device of a client's trainer has no memory left, so many times; the folder counts them."""

    def report(view):
        count = len(list(Path(folder).glob("oom-*")))
        if view.id == client and count < times:
            (Path(folder) / f"oom-{count}").touch()
            raise torch.OutOfMemoryError("the toy is full")
        return {}

    return Method("out_of_memory", report=report)


def hungry(*, client: int, share: float):
    """A client that needs a share of its GPU's whole memory for a moment; nothing on a CPU."""

    def report(view):
        if view.id == client and view.params.is_cuda:
            total = torch.cuda.get_device_properties(view.params.device).total_memory
            torch.empty(int(share * total), dtype=torch.uint8, device=view.params.device)
            torch.cuda.empty_cache()
        return {}

    return Method("hungry", report=report)


def poison(*, client: int, value: float = float("nan")):
    """One client's parameters become non-finite."""

    def grads(inner, view):
        def gradient(params, batch):
            grad = inner(params, batch)
            return grad.fill_(value) if view.id == client else grad

        return gradient

    return Method("poison", grads=grads)


def spoils():
    """The server's update becomes NaN."""
    return Method("spoils", server_update=lambda update, state, view: (update * float("nan"), state))


def kills_worker(*, marker: str, round_index: int, number: int = signal.SIGKILL):
    """The first client that reports in a round sends its worker a signal, SIGKILL or SIGSTOP, once."""

    def report(client):
        path = Path(marker)
        if client.round_index == round_index and not path.exists():
            path.write_text(str(os.getpid()))
            os.kill(os.getpid(), number)
        return {}

    return Method("kills_worker", report=report)


def accelerated(*, folder: str, is_everywhere: bool = True):
    """Actors have the device of tests/device/other.py, or the first one with a part of a GPU; clients note their device."""
    import ray

    from tests.device.other import OtherDevice, register

    if ray.is_initialized() and (context := ray.get_runtime_context()).get_actor_id():
        is_first = context.get_assigned_resources().get("GPU") and not Path(folder, "first").exists()
        if is_everywhere or is_first:
            Path(folder, "first").touch()
            register()
            OtherDevice().__enter__()

    def report(client):
        Path(folder, f"on-{client.params.device.type}").touch()
        return {}

    return Method("accelerated", report=report)


def hangs(*, client: int):
    """One client never ends."""

    def report(view):
        while view.id == client:
            time.sleep(0.1)
        return {}

    return Method("hangs", report=report)


def kills_holder(*, folder: str, weighing: int, mapping: int):
    """Kills a worker that has trained: the server before the sum of one round, the worker itself in a map of another."""

    def report(client):
        (Path(folder) / f"holder-{client.round_index}").write_text(str(os.getpid()))
        return {}

    def weigh(weights, server):
        if server.round_index == weighing:
            os.kill(int((Path(folder) / f"holder-{weighing}").read_text()), 9)
            (Path(folder) / "killed-weighing").touch()
        if server.round_index == mapping:
            server.map_updates(_killed_once, str(Path(folder) / "killed-mapping"))
        return weights

    return Method("kills_holder", report=report, weigh=weigh)


def _killed_once(update, marker):
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), 9)
    return update.sum()


def waits(*, folder: str, training: list[int], weighing: list[int]):
    """In some rounds everybody who trains, or the server that weighs, writes `here-ROUND` and waits for `go-ROUND`."""

    def pause(round_index):
        (Path(folder) / f"here-{round_index}").touch()
        while not (Path(folder) / f"go-{round_index}").exists():
            time.sleep(0.05)

    def report(client):
        if client.round_index in training:
            pause(client.round_index)
        return {}

    def weigh(weights, server):
        if server.round_index in weighing:
            pause(server.round_index)
        return weights

    return Method("waits", report=report, weigh=weigh)


def lingers(*, seconds: float):
    """Every round takes longer; no number changes."""

    def weigh(weights, server):
        time.sleep(seconds)
        return weights

    return Method("lingers", weigh=weigh)


def ends_server(*, folder: str, rounds: list[int]):
    """The server's process ends itself when it weighs in some rounds, once in each: `server-ROUND` says that it was done."""

    def weigh(weights, server):
        if server.round_index in rounds:
            with contextlib.suppress(FileExistsError):
                (Path(folder) / f"server-{server.round_index}").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return weights

    return Method("ends_server", weigh=weigh)


def stumbles(*, client: int, round_index: int):
    """One client once has non-finite memory and a non-finite update."""

    def grads(inner, view):
        count = view.memory.get("count", torch.zeros(1))
        is_bad = view.id == client and view.round_index == round_index
        view.memory["count"] = count + (float("nan") if is_bad else 1)

        def gradient(params, batch):
            grad = inner(params, batch)
            return grad.fill_(float("nan")) if is_bad else grad

        return gradient

    return Method("stumbles", grads=grads, needs=frozenset({"client-memory"}))


def asks_twice():
    """Asks for another gradient while it holds the first; the result must be the first."""

    def grads(inner, client):
        def gradient(params, batch):
            grad = inner(params, batch)
            client.model.gradient(lambda out, b: out.logits.sum(), client.start, batch)
            client.validation_gradient("eval")
            return grad

        return gradient

    return Method("asks_twice", grads=grads, needs=frozenset({"validation-set"}))


def writes_to_start():
    """Breaks the contract: `start` is shared by all clients of a trainer."""

    def grads(inner, client):
        client.start.zero_()
        return inner

    return Method("writes_to_start", grads=grads)


def writes_to_start_in_a_backward_pass():
    """The same, when no hook is called."""

    def loss(inner, client):
        def wrapped(outputs, batch):
            outputs.logits.register_hook(lambda gradient: (client.start.zero_(), None)[1])
            return inner(outputs, batch)

        return wrapped

    return Method("writes_late", loss=loss)


def no_method():
    """Not a method at all."""
    return 3


def stands_still():
    """Every gradient is zero: nobody moves."""
    return Method("stands_still", grads=lambda inner, client: lambda params, batch: inner(params, batch).zero_())


def scatter_killed_once(folder, plan, table):
    """`pipeline._scattered` whose process dies in the middle of its first window, with half of the rows written."""
    from raysim.data.pipeline import _scattered

    try:
        (Path(folder) / "killed").touch(exist_ok=False)
    except FileExistsError:
        return _scattered(plan, table)
    _scattered(plan, table.slice(0, len(table) // 2))
    os.kill(os.getpid(), signal.SIGKILL)


def middle_of_all(*, ends: str = "", round_index: int = 1):
    """The server step is the coordinate-wise median; with `ends`, a file, the first worker that gets a block ends itself.

    The products of all pairs are logged, so that records hold a sum over blocks as well.
    """

    def server_update(update, state, server):
        if ends and server.round_index == round_index:
            server.map_columns(_ends_worker, ends)
        server.log("products", sum(server.map_columns(_products, None, update[None])))
        return torch.cat(server.map_columns(_median)), state

    return Method("middle_of_all", server_update=server_update, claims=frozenset({"merge"}))


def _median(block, extra, shared):
    return block.median(dim=0).values


def _products(block, extra, shared):
    rows = torch.cat([block, extra]).double()
    return rows @ rows.T


def _ends_worker(block, extra, marker):
    with contextlib.suppress(FileExistsError):
        Path(marker).touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)


def copies_the_others(*, share: float = 0.4):
    """Some clients send the mean of what the others sent, turned around; they know nothing if there are no others."""

    def overhear(server):
        return {"mean": server.total("update", server.weights)[: server.layout.num_params].float()}

    def outgoing(update, client):
        mean = client.overheard.get("mean")
        return update if mean is None else update._replace(values=-mean)

    return Method("copies_the_others", overhear=overhear, late_share=share, outgoing=outgoing)
