"""What cannot run together is refused with the names and the remedy."""

from __future__ import annotations

import pytest

from methods import METHODS
from raysim.base.errors import ConfigError
from raysim.core.conflicts import conflicts, resources_of
from raysim.core.hooks import CALLS
from tests.support import toys
from tests.support.federations import lora_plan, plan_of


def faults_of(root, methods, **groups):
    with pytest.raises(ConfigError) as caught:
        plan_of(root, methods, **groups)
    return [fault.message for fault in caught.value.faults]


@pytest.mark.slow
def test_empty_list_and_every_single_method_compose(root):
    plan_of(root)
    for name, make in METHODS.items():
        (lora_plan if "lora" in make().needs else plan_of)(
            root, [name, *["coordinate_median"] * bool(make().wraps)], cohort={"size": 12}
        )


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (["uniform", "fedvg"], ["uniform and fedvg both decide", "drop one"]),
        (["fednova", "fedvg"], ["fedvg after fednova would discard", "put fedvg before fednova"]),
        (["fedavgm", "fedadam"], ["fedavgm and fedadam both decide server-optimizer"]),
        (["fedyogi", "fedadagrad"], ["fedyogi and fedadagrad both decide server-optimizer"]),
        (
            ["tests.support.toys:criterion", "tests.support.toys:other_criterion"],
            ["criterion and other_criterion both decide criterion"],
        ),
        (["fedvg", "tests.support.toys:regmean"], ["fedvg and regmean both decide weights:fc2.weight"]),
        (["fedprox", "fedprox"], ["fedprox is listed twice"]),
        (["tests.support.toys:personal_head", "tests.support.toys:regmean"], ["regmean claims weights:fc2.weight"]),
        (["fedrs", "fedlc"], ["fedrs and fedlc both decide criterion", "drop one"]),
        (["flfa", {"fa": {"layers": ["fc1"]}}], ["flfa and fa both decide backward:fc1"]),
        ([{"flfa": {"candidates": ["fc2", "fc1"]}}, {"fa": {"layers": ["fc1"]}}], ["both decide backward:fc1"]),
        (["flfa", "dfa"], ["flfa and dfa both decide backward:conv1"]),
        ([{"flfa": {"candidates": ["fc9"]}}], ["flfa claims backward:fc9", "there are conv1, conv2, fc1, fc2"]),
        (["fedacg", "fedavgm"], ["fedacg and fedavgm both decide server-optimizer"]),
        (["freeze", "ccvr"], ["ccvr claims weights:", "no trained and shared tensor has the name"]),
        (["freeze", {"flfa": {"candidates": ["fc2"]}}], ["flfa claims backward:fc2"]),
        (["univarfl", "fedrs"], ["fedrs after univarfl would discard", "put fedrs before univarfl"]),
        (["moon", "fedlc"], ["put fedlc before moon"]),
        ([{"freeze": {"trains_locally": True}}, "fedvg"], ["put fedvg before freeze"]),
    ],
)
def test_conflicts_name_methods_and_remedy(root, methods, words):
    text = " | ".join(faults_of(root, methods))
    for word in words:
        assert word in text


def test_one_cause_is_one_fault_whatever_the_number_of_methods(root):
    rules = ["krum", "bulyan", "dnc", "trimmed_mean", "fltrust"]
    excluded, weights, merge = sorted(faults_of(root, rules), key=lambda text: "decide merge" in text)
    assert excluded.startswith(
        "krum, dnc and fltrust cannot be combined with bulyan and trimmed_mean because of their `weigh`"
    )
    assert excluded.endswith("; drop krum, dnc and fltrust, or bulyan and trimmed_mean")
    assert weights.startswith("krum, dnc and fltrust all decide weights:")
    assert merge.startswith("bulyan and trimmed_mean both decide merge: drop one")


def test_right_order_of_modifier_and_replacer_is_legal(root):
    plan_of(root, ["fedrs", "univarfl", "moon"])
    plan_of(root, ["fedvg", {"freeze": {"trains_locally": True}}])
    plan_of(root, [{"flfa": {"candidates": ["fc2"]}}, {"fa": {"layers": ["fc1"]}}])
    plan_of(root, ["fedvg", "fednova"])


def test_needs_name_the_remedy(root):
    assert "data.validation" in faults_of(root, ["fedvg"], data={"root": str(root), "validation": 0})[0]
    plan_of(root, [{"fedvg": {"norm": "update"}}], data={"root": str(root), "validation": 0})
    assert "local.optimizer" in faults_of(root, ["scaffold"], local={"optimizer": "adamw"})[0]


@pytest.mark.parametrize("methods", [["livar"], ["krum", "dp"]])
def test_one_cause_is_one_fault(root, methods):
    """LIVAR without adapters claims nothing, too; Krum decides weights, which dp excludes."""
    assert len(faults_of(root, methods)) == 1


def test_claims_match_only_what_is_trained_and_shared(root):
    plan = plan_of(root)
    resources = resources_of(plan.layout)
    assert "weights:conv1.weight" in resources
    assert "backward:conv1" in resources
    assert conflicts([toys.regmean(head="nothing")], resources, {"features"})


@pytest.mark.parametrize("methods", [["fedavg"], [{"fedavg": {}}], ["fedavg", "fedavg"]])
def test_fedavg_by_its_name_is_the_empty_list(methods, root):
    assert plan_of(root, methods).config == plan_of(root, []).config
    assert plan_of(root, [*methods, "fedprox"]).config == plan_of(root, ["fedprox"]).config
    made = METHODS["fedavg"]()
    assert [hook for hook in CALLS if getattr(made, hook) is not None] == []
