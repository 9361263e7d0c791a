"""FedVG's premise as `diagnostics` measures it: by plain loops, without a trace in the training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr

from raysim.base.errors import ConfigError
from tests.support.federations import plan_of, run, server_on

PREMISE = {"diagnostics": {"measures": ["premise"]}}


def held_out(trainer, name):
    images, labels = trainer.data.federation.held_out(name)
    return trainer.transform(torch.from_numpy(images.copy())), torch.from_numpy(np.array(labels))


def test_premise_is_each_clients_gradient_and_accuracy(root):
    """One plain pass over all validation rows, and the test rows one by one."""
    plan = plan_of(root, ["tests.methods.test_fedvg_options:spy_states", PREMISE], cohort={"size": 4})
    server = server_on(plan, root)
    record = server.run_round(0)
    trainer = server.pool._trainer
    (x, y), (images, labels) = held_out(trainer, "validation"), held_out(trainer, "test")
    want = []
    for state in server.method_state["spy_states"]["states"]:
        trainer.model.load(state)
        module = trainer.model.module.eval()
        grads = torch.autograd.grad(F.cross_entropy(module(x), y), list(module.parameters()))
        with torch.no_grad():
            hits = [
                int(module(image[None]).argmax()) == label for image, label in zip(images, labels.tolist(), strict=True)
            ]
        want.append([np.mean([float(grad.abs().sum()) for grad in grads]), np.mean(hits)])
    found = record.arrays["diagnostics.premise"]
    assert found == pytest.approx(np.array(want), rel=1e-4)
    assert record.arrays["diagnostics.premise:columns"].tolist() == ["validation_gradient", "accuracy"]
    assert record.arrays["diagnostics.premise:clients"].tolist() == record.clients["client"].tolist()
    correlation = record.metrics["diagnostics/accuracy_by_gradient"]
    assert correlation == pytest.approx(spearmanr(*np.array(want).T).statistic)


@pytest.mark.slow
def test_premise_leaves_clients_without_a_step_out_and_training_alone(root):
    groups = {"model": {"norm": "batch"}, "partition": {"alpha": 0.05, "num_clients": 25, "min_samples": 1}}
    groups |= {"cohort": {"size": 25}}
    server = server_on(plan_of(root, ["fedvg", PREMISE], **groups), root)
    records = [server.run_round(index) for index in range(2)]
    idle = np.asarray(records[0].clients["num_steps"]) == 0
    values = records[0].arrays["diagnostics.premise"]
    assert idle.any()
    assert (np.isnan(values).all(axis=1) == idle).all()
    assert -1 <= records[0].metrics["diagnostics/accuracy_by_gradient"] <= 1
    plain = run(plan_of(root, ["fedvg"], **groups), root, rounds=2)
    assert server.params_sha256() == plain.params_sha256()
    assert server.counters == plain.counters


@pytest.mark.parametrize(("part", "remedy"), [("validation", "data.validation above 0"), ("test", "data.test above 0")])
def test_premise_needs_both_held_out_sets(part, remedy, root):
    with pytest.raises(ConfigError, match=remedy):
        plan_of(root, [PREMISE], data={part: 0})
