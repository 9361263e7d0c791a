"""What a trainer hands over is the client's own, whatever the next client does to the model."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from raysim.core.method import Method
from raysim.engine.messages import packed_copy
from raysim.engine.trainer import Trainer
from raysim.training.inputs import Examples, InputTransform
from tests.support.federations import plan_of, run, server_on


def returns_views():
    """Reports and remembers views of the model that it was given, as a careless author would."""

    def report(client):
        client.memory["whole"] = client.params
        client.memory["array"] = client.params.numpy()[-4:]
        return {"first": client.params[:5]}

    def weigh(weights, server):
        server.log("first", server.report["first"])
        return weights

    return Method("returns_views", report=report, weigh=weigh, needs=frozenset({"client-memory"}))


def test_views_of_the_model_are_copied_when_a_client_is_done(root):
    server = server_on(plan_of(root, ["tests.engine.test_trainer:returns_views"]), root)
    record = server.run_round(0)
    reported = record.arrays["returns_views.first"]
    held = server.pool._trainer._vectors
    memories = {client: server.client_memory(client)["returns_views"] for client in server.changed_clients()}
    start = run(plan_of(root), root, rounds=0).params
    assert len(memories) > 1
    for (client, memory), first in zip(sorted(memories.items()), reported, strict=True):
        own = start + held.of("update", [client])[0][: len(start)]
        torch.testing.assert_close(torch.from_numpy(memory["whole"]), own, rtol=0, atol=1e-6)
        assert (memory["whole"][:5] == first).all()
        assert (memory["whole"][-4:] == memory["array"]).all()
    assert len({memory["whole"].tobytes() for memory in memories.values()}) == len(memories)


def test_a_packed_copy_shares_no_memory():
    tensor, array = torch.zeros(3), torch.zeros(3).numpy()
    packed = packed_copy({"a": tensor, "b": [array, tensor[1:], 7]})
    tensor += 1
    array += 1
    assert packed["a"].sum() == packed["b"][0].sum() == packed["b"][1].sum() == 0
    assert packed["b"][2] == 7


def test_a_clients_batches_are_normalised_unless_it_asks_for_pixels():
    images = torch.arange(5 * 2 * 2, dtype=torch.uint8).view(5, 2, 2, 1)
    trainer = SimpleNamespace(transform=InputTransform((0.5,), (0.25,)), evaluation_batch=3)
    examples = Examples(images, torch.arange(5))
    batches, pixels = Trainer.batches_of(trainer, examples), Trainer.batches_of(trainer, examples, is_normalised=False)
    unit = images.permute(0, 3, 1, 2) / 255
    for found, expected in ((batches, (unit - 0.5) / 0.25), (pixels, unit)):
        parts = list(found)
        assert [len(batch.targets) for batch in parts] == [3, 2]
        torch.testing.assert_close(torch.cat([batch.inputs for batch in parts]), expected)
