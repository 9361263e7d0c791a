"""A method made of others does what its parts do in a list."""

from __future__ import annotations

import pytest
import torch

from methods import METHODS
from raysim.core.method import Method, Vector
from raysim.core.stack import Stack, chain
from tests.support.federations import plan_of, run


def scaffold_and_vg():
    return chain("both", METHODS["scaffold"](), METHODS["fedvg"](granularity="block"))


def remembering():
    """Every kind of namespace at once: memory, scratch, a report, a Vector, server state."""

    def report(client):
        client.memory["rounds"] = client.memory.get("rounds", torch.zeros(())) + 1
        client.scratch["seen"] = True
        return {"rounds": client.memory["rounds"], "shift": Vector(client.params - client.start)}

    def server_update(update, state, server):
        assert torch.equal(server.report["rounds"].double(), server.report["rounds"].double().round())
        total = server.total("shift", {leaf.name: server.weights[leaf.name] for leaf in server.layout.params})
        assert torch.allclose(total.float(), server.total("update", server.weights)[: len(total)].float())
        return update, {"count": state.get("count", 0) + 1}

    return Method("remembering", report=report, server_update=server_update, needs=frozenset({"client-memory"}))


def both():
    return chain("pair", remembering(), METHODS["fedprox"](mu=0.1))


def test_a_chain_equals_the_list_of_its_parts(root):
    parts = run(plan_of(root, ["scaffold", {"fedvg": {"granularity": "block"}}]), root)
    whole = run(plan_of(root, ["tests.core.test_chain:scaffold_and_vg"]), root)
    assert whole.params_sha256() == parts.params_sha256()
    assert "control" in whole.method_state["both"]["scaffold"]


def test_parts_keep_their_own_memory_reports_and_state(root):
    server = run(plan_of(root, ["tests.core.test_chain:both"], cohort={"size": 12}), root)
    assert server.method_state["pair"] == {"remembering": {"count": 3}}
    assert float(server.client_memory(0)["pair"]["remembering"]["rounds"]) == 3
    plain = run(plan_of(root, [{"fedprox": {"mu": 0.1}}], cohort={"size": 12}), root)
    assert server.params_sha256() == plain.params_sha256()


def test_a_phase_has_no_place_in_a_chain():
    with pytest.raises(ValueError, match=r"ccvr runs as a separate phase; list it beside the chain"):
        chain("x", METHODS["ccvr"]())


def test_a_part_may_not_do_what_another_excludes():
    with pytest.raises(ValueError, match="chain 'x': scaffold cannot run beside dp because of its `report`"):
        chain("x", METHODS["dp"](), METHODS["scaffold"]())
    assert chain("x", METHODS["dp"](trust=["scaffold"]), METHODS["scaffold"]()).trusts >= {"scaffold"}


def test_claims_and_needs_of_the_parts_are_the_chains():
    method = both()
    assert method.needs == {"client-memory"}
    assert chain("u", METHODS["uniform"]()).base_weights == Stack([METHODS["uniform"]()]).base_weights == "uniform"
