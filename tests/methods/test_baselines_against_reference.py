"""SCAFFOLD, FedDyn, Elastic, FedOpt and FedNova against their naive twins, alone and with FedVG."""

from __future__ import annotations

import pytest

from raysim.core.cohorts import choose_cohort
from tests.support.federations import plan_of, run, server_on
from tests.support.method_cases import CNN_CASES, FL_BENCH
from tests.twins.baselines import NaiveElastic, NaiveFedDyn, NaiveFedNova, NaiveFedOpt, NaiveScaffold
from tests.twins.federation import Naive, assert_same_state, fedvg_weights

#: Everything on that the method allows; lr_decay, so that the lr of the round matters.
PLAIN = {"lr": 0.05, "epochs": 2, "lr_decay": 0.9, "weight_decay": 0.01}
MOMENTUM = {**PLAIN, "momentum": 0.5}
#: A bias before BatchNorm has no gradient but rounding, so a zeta of its own is noise, which decay would multiply.
NO_DECAY = {**MOMENTUM, "weight_decay": 0.0}
#: Case -> its twin, the twin's options, and how clients train.
CASES = {
    "scaffold": (NaiveScaffold, {"server_lr": 0.8}, PLAIN),
    "scaffold-i": (NaiveScaffold, {"option": "i"}, PLAIN),
    "scaffold-fl-bench": (NaiveScaffold, {"persists": False}, PLAIN),
    "feddyn": (NaiveFedDyn, {"alpha": 0.2}, MOMENTUM),
    "feddyn-clipped": (NaiveFedDyn, {"alpha": 0.2, "max_grad_norm": 0.5}, MOMENTUM),
    "feddyn-examples": (NaiveFedDyn, {"alpha": 0.2, "base": "examples"}, MOMENTUM),
    "feddyn-fl-bench": (
        NaiveFedDyn,
        {"alpha": 0.1, "max_grad_norm": 0.5, "quadratic": False, "base": "examples"},
        PLAIN,
    ),
    "elastic": (NaiveElastic, {"tau": 0.4}, MOMENTUM),
    "elastic-all": (NaiveElastic, {"ratio": 1.0}, MOMENTUM),
    "elastic-fl-bench": (NaiveElastic, {"form": "fl-bench"}, NO_DECAY),
    "fedadam": (NaiveFedOpt, {"kind": "adam", "server_lr": 0.01, "beta1": 0.9}, MOMENTUM),
    "fedadam-init-v": (
        NaiveFedOpt,
        {"kind": "adam", "server_lr": 0.01, "beta1": 0.9, "beta2": 0.9, "init_v": 1e-6},
        MOMENTUM,
    ),
    "fedyogi": (NaiveFedOpt, {"kind": "yogi", "server_lr": 0.01, "beta1": 0.9}, MOMENTUM),
    "fedadagrad": (NaiveFedOpt, {"kind": "adagrad", "server_lr": 0.01, "beta1": 0.0}, MOMENTUM),
    "fednova": (NaiveFedNova, {}, PLAIN),
}


def compare(plan, naive, root, rounds):
    """The server, after rounds in which it went as its twin did."""
    server = server_on(plan, root)
    for index in range(rounds):
        server.run_round(index)
        naive.round(index)
    assert_same_state(server, naive)
    return server


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("case", CASES)
def test_baseline_matches_reference_after_3_rounds(case, norm, root):
    twin, options, local = CASES[case]
    plan = plan_of(root, CNN_CASES[case], model={"norm": norm}, local=local, cohort={"size": 5})
    compare(plan, twin(plan, **options), root, 3)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_fednova_matches_reference_where_clients_have_momentum(norm, root):
    plan = plan_of(root, ["fednova"], model={"norm": norm}, local=MOMENTUM, cohort={"size": 5})
    compare(plan, NaiveFedNova(plan), root, 3)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_baseline_matches_reference_where_clients_take_no_step(case, root):
    """With BatchNorm a client of one example takes no step."""
    twin, options, local = CASES[case]
    groups = {"partition": {"alpha": 0.05, "num_clients": 25, "min_samples": 1}, "cohort": {"size": 25}}
    plan = plan_of(root, CNN_CASES[case], model={"norm": "batch"}, local={**local, "epochs": 1}, **groups)
    assert 1 in plan.manifest.sizes.tolist()
    compare(plan, twin(plan, **options), root, 2)


def test_fednova_with_fedprox_matches_reference(root):
    methods = [{"fedprox": {"mu": 0.7}}, {"fednova": {"mu": 0.7}}]
    plan = plan_of(root, methods, local=PLAIN, cohort={"size": 5})
    compare(plan, NaiveFedNova(plan, prox=0.7), root, 3)


# --- FedVG with each of six bases (FedVG, table A.7) ------------------------------------------------------------------

BASES = {
    "fedprox": ({"fedprox": {"mu": 0.1}}, Naive, {"mu": 0.1}),
    "fedavgm": ({"fedavgm": {"form": "nesterov"}}, Naive, {"momentum": (0.9, "nesterov")}),
    "scaffold": ("scaffold", NaiveScaffold, {}),
    "feddyn": ({"feddyn": {"max_grad_norm": 10}}, NaiveFedDyn, {"alpha": 0.1, "max_grad_norm": 10}),
    "elastic": ("elastic", NaiveElastic, {}),
    "scaffold-fl-bench": ({"scaffold": FL_BENCH}, NaiveScaffold, {"persists": False}),
    "feddyn-fl-bench": ({"feddyn": FL_BENCH}, NaiveFedDyn, {"alpha": 0.1, "quadratic": False, "base": "examples"}),
    "elastic-fl-bench": ({"elastic": FL_BENCH}, NaiveElastic, {"form": "fl-bench"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["model", "layer"])
@pytest.mark.parametrize("base", BASES)
def test_fedvg_replaces_the_weights_of_each_base_in_either_order(base, granularity, root):
    method, twin, options = BASES[base]
    fedvg = {"fedvg": {"granularity": granularity}}
    groups = {"local": PLAIN, "cohort": {"size": 5}}
    plan = plan_of(root, [method, fedvg], **groups)
    naive = twin(plan, weights=fedvg_weights(granularity, "l1", "train"), **options)
    server = compare(plan, naive, root, 2)
    other = run(plan_of(root, [fedvg, method], **groups), root, rounds=2)
    assert other.params_sha256() == server.params_sha256()


@pytest.mark.parametrize(("base", "twin"), [([], Naive), (["scaffold"], NaiveScaffold)])
def test_fedvg_averages_with_the_weights_of_its_base(base, twin, root):
    """FedVG's FedAvg row; with SCAFFOLD the mean is of uniform weights and scores."""
    plan = plan_of(root, [*base, {"fedvg": {"mix": "average"}}], local=PLAIN, cohort={"size": 5})
    compare(plan, twin(plan, weights=fedvg_weights("model", "l1", "train", "average")), root, 2)


@pytest.mark.parametrize("granularity", ["model", "layer"])
def test_fednova_normalises_fedvgs_weights(granularity, root):
    plan = plan_of(root, [{"fedvg": {"granularity": granularity}}, "fednova"], local=PLAIN, cohort={"size": 5})
    compare(plan, NaiveFedNova(plan, weights=fedvg_weights(granularity, "l1", "train")), root, 2)


@pytest.mark.parametrize("case", CASES)
def test_a_round_in_which_nobody_takes_a_step_changes_nothing(case, root):
    groups = {"partition": {"alpha": 0.05, "num_clients": 25, "min_samples": 1}, "cohort": {"size": 1}}
    plan = plan_of(root, CNN_CASES[case], model={"norm": "batch"}, rounds=10_000, **groups)
    server = server_on(plan, root)
    seed, sizes = plan.config.seed, plan.manifest.sizes
    idle = next(i for i in range(10_000) if sizes[choose_cohort(25, 1, seed=seed, round_index=i)[0]] == 1)
    if idle:
        server.run_round(0)  # some state, which must not move anything by itself
    before = server.params_sha256()
    server.run_round(idle)
    assert server.params_sha256() == before
