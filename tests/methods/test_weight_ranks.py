"""Who gets the weight: rank correlations against SciPy's, and what they say of methods whose rule is known."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

from methods.rank_correlations import mean_weights, rank_correlation
from raysim.core.layout import layout_of
from raysim.core.weights import RightMap
from tests.support.federations import plan_of, server_on

WHO = {"diagnostics": {"measures": ["weights"]}}
NAMES = ("update", "examples", "entropy")


@pytest.mark.parametrize("seed", range(4))
def test_rank_correlation_is_scipys(seed):
    rng = np.random.default_rng(seed)
    one, other = rng.integers(0, 5, 12).astype(float), rng.normal(size=12)  # with ties
    got = rank_correlation(torch.from_numpy(one), torch.from_numpy(other))
    assert got == pytest.approx(spearmanr(one, other).statistic)


def test_what_is_all_alike_has_no_rank():
    for values in ([2.0, 2.0, 2.0], [1.0], []):
        assert math.isnan(rank_correlation(torch.tensor(values).double(), torch.arange(len(values)).double()))


def test_a_clients_weight_is_its_mean_over_all_numbers_of_the_weighted_leaves():
    layout = layout_of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), head="1")
    maps = torch.stack([torch.diag(torch.tensor([0.2, 0.4])), torch.diag(torch.tensor([0.8, 0.6]))]).double()
    weights = {
        "0.weight": RightMap(maps),  # 6 numbers, a mean weight of 0.3 and 0.7
        "0.bias": torch.tensor([0.5, 0.5], dtype=torch.float64),  # 3 numbers
        "1.weight": torch.tensor([1.0, 0.0], dtype=torch.float64),  # 3 numbers; the other bias has no weight
    }
    server = SimpleNamespace(clients=torch.arange(2), layout=layout, weights=weights)
    assert mean_weights(server).tolist() == pytest.approx([(6 * 0.3 + 1.5 + 3) / 12, (6 * 0.7 + 1.5) / 12])
    assert mean_weights(SimpleNamespace(clients=torch.arange(2), layout=layout, weights={})).tolist() == [0.0, 0.0]


def test_it_names_the_rule_of_methods_that_are_one(root):
    """FedAvg goes by examples, the update norm by movement, and equal weights by nothing."""

    def found(*methods):
        server = server_on(plan_of(root, [*methods, WHO]), root)
        metrics = server.run_round(0).metrics
        return [metrics[f"diagnostics/weight_by_{name}"] for name in NAMES]

    assert found()[1] == pytest.approx(1)
    # One L2 norm over the model ranks as the mean over its tensors nearly does.
    assert found({"fedvg": {"norm": "update"}})[0] < -0.7
    assert all(math.isnan(value) for value in found("uniform"))
    regmean = found("regmean")  # maps for the linear layers, shares for the others
    assert all(-1 <= value <= 1 for value in regmean)
