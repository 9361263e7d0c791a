"""FLFA's property checks."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from methods.feedback import feedback_op
from methods.flfa import agreements, candidate_layers, flfa, skewness
from raysim.core.layout import layout_of
from raysim.core.method import Method
from raysim.core.seeding import derive_seed, torch_generator
from tests.support.federations import plan_of, run, server_on, steps_plan

MODULE = torch.nn.Sequential(
    torch.nn.Conv2d(1, 3, 3), torch.nn.Conv2d(3, 2, 1), torch.nn.BatchNorm2d(2), torch.nn.Linear(8, 3)
)
LAYOUT = layout_of(MODULE, head="3", channels_last=True)
LEAVES = [leaf for leaf in LAYOUT.params if len(leaf.shape) >= 2]


def digest(root, methods, rounds=None, **groups):
    return run(plan_of(root, methods, **groups), root, rounds=rounds).params_sha256()


def only(layer, **options):
    return {"flfa": {"candidates": [layer], **options}}


def test_feedback_in_the_first_layer_changes_nothing(root):
    assert digest(root, [only("conv1")]) == digest(root, [])


def test_round_0_is_backpropagation_and_round_1_is_not(root):
    assert digest(root, [only("fc1")], rounds=1) == digest(root, [], rounds=1)
    assert digest(root, [only("fc1")], rounds=2) != digest(root, [], rounds=2)


@pytest.mark.parametrize("scale", ["layer", "none"])
def test_the_first_local_step_of_a_round_is_backpropagation(scale, root):
    def after(steps, methods):
        return run(steps_plan(root, methods, steps=steps, cohort={"size": 3}), root).params_sha256()

    one, two = after(1, []), after(2, [])
    for layer in ("conv2", "fc1", "fc2"):
        assert after(1, [only(layer, scale=scale)]) == one
        assert after(2, [only(layer, scale=scale)]) != two


def test_variants_differ(root):
    options = [{}, {"scale": "none"}, {"feedback": "random"}, {"feedback": "resampled"}]
    options.append({"feedback": "random", "seed": 1})
    plans = [steps_plan(root, [only("fc1", **option)], steps=3, cohort={"size": 3}) for option in options]
    assert len({run(plan, root).params_sha256() for plan in plans}) == len(options)


def fake(updates, **options):
    """A server view over given updates."""
    updates = [u.float() for u in updates]

    def total(name, weights):
        result = torch.zeros(LAYOUT.num_params, dtype=torch.float64)
        for leaf in LAYOUT.params:
            if leaf.name in weights:
                for weight, update in zip(weights[leaf.name], updates, strict=True):
                    result[leaf.offset : leaf.end] += weight * update[leaf.offset : leaf.end].double()
        return result

    logged = {}
    return SimpleNamespace(
        layout=LAYOUT,
        clients=torch.arange(len(updates)),
        is_active=torch.tensor([bool(u.any()) for u in updates]),
        total=total,
        map_updates=lambda f, shared: [f(u.clone(), shared) for u in updates],
        log=lambda name, value, columns=(): logged.update({name: value}),
        logged=logged,
        **options,
    )


def updates(count, seed=0):
    return list(torch.randn(count, LAYOUT.num_params, generator=torch.Generator().manual_seed(seed)))


def score(them):
    return agreements(fake(them), LEAVES)


def test_agreement_matches_plain_loops():
    them = updates(5)
    for index, leaf in enumerate(LEAVES):
        parts = [u[leaf.offset : leaf.end].double() for u in them]
        mean = sum(parts) / 5
        want = sum(float(F.cosine_similarity(p, mean, dim=0)) for p in parts) / 5
        assert float(score(them)[index]) == pytest.approx(want, abs=1e-6)


def test_agreement_is_bounded_and_blind_to_order_and_scale():
    them = updates(6)
    scores = score(them)
    assert bool((scores.abs() <= 1).all())
    assert torch.allclose(score([3.5 * u for u in them]), scores, atol=1e-6)
    assert torch.allclose(score(them[::-1]), scores, atol=1e-6)
    assert torch.allclose(score([them[0]] * 4), torch.ones(len(LEAVES), dtype=torch.float64), atol=1e-6)


def test_agreement_of_degenerate_cohorts():
    one = updates(1)[0]
    assert score([one, -one]).tolist() == [0.0] * len(LEAVES)
    idle = torch.zeros_like(one)
    them = updates(3)
    assert torch.allclose(score([*them, idle]), score(them), atol=1e-6)
    assert score([idle, idle]).tolist() == [0.0] * len(LEAVES)
    assert torch.allclose(score([one, idle]), torch.ones(len(LEAVES), dtype=torch.float64), atol=1e-6)


def choose(method, them, state=None):
    view = fake(them)
    _, state = method.server_update(torch.zeros(1), state or method.init(torch.zeros(1), LAYOUT), view)
    return state, view


def test_ties_go_to_the_first_layer_and_several_are_ordered():
    same = [updates(1)[0]] * 3
    for strategy in ("lowest", "highest"):
        state, _ = choose(flfa(strategy=strategy), [same[0] * 0.5, same[0] * 0.5])
        assert len(state["layers"]) == 1
    one = updates(1)[0]
    with pytest.warns(UserWarning, match="flfa: the chosen layer '0' is the first"):
        assert choose(flfa(strategy="lowest"), [one, -one])[0]["layers"] == [0]
    assert choose(flfa(strategy="highest"), [one, -one])[0]["layers"] == [0]
    them = updates(4)
    scores = score(them).tolist()
    by_score = sorted(range(len(scores)), key=scores.__getitem__)
    state, view = choose(flfa(strategy="lowest", num_layers=2), them)
    assert state["layers"] == by_score[:2]
    assert (view.logged["layer"], view.logged["layer_2"]) == tuple(by_score[:2])
    assert choose(flfa(strategy="highest"), them)[0]["layers"] == by_score[-1:]


def test_the_strategy_is_decided_once_from_the_skewness():
    assert skewness(torch.tensor([0.1, 0.1, 0.1, 0.9])) > 0 > skewness(torch.tensor([0.9, 0.9, 0.9, 0.1]))
    assert skewness(torch.tensor([0.5, 0.5])) == 0
    values = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    centred = values - 4
    want = float((centred**3).mean() / (centred**2).mean() ** 1.5)
    assert skewness(values) == pytest.approx(want)
    seen = set()
    for seed in range(12):
        state, _ = choose(flfa(), updates(4, seed))
        wanted = "lowest" if skewness(score(updates(4, seed))) > 0 else "highest"
        assert state["strategy"] == wanted
        again, _ = choose(flfa(), updates(4, seed + 100), state)
        assert again["strategy"] == wanted
        seen.add(wanted)
    assert seen == {"lowest", "highest"}


def test_a_round_in_which_nobody_moved_keeps_the_choice():
    state = {"layers": [2], "strategy": "lowest"}
    idle = [torch.zeros(LAYOUT.num_params)] * 2
    assert choose(flfa(), idle, state)[0] == state


def test_layers_that_stay_at_the_clients_are_no_candidates(root):
    plan = plan_of(root, ["personal", "flfa"])
    assert list(candidate_layers(plan.layout, "all", first_layer=True)) == ["conv1", "conv2", "fc1"]


def test_candidates():
    assert list(candidate_layers(LAYOUT, "all", first_layer=True)) == ["0", "1", "3"]
    assert list(candidate_layers(LAYOUT, "all", first_layer=False)) == ["1", "3"]
    assert list(candidate_layers(LAYOUT, "pointwise", first_layer=True)) == ["1", "3"]
    assert list(candidate_layers(LAYOUT, ["3", "0"], first_layer=True)) == ["0", "3"]


def test_faults_name_the_remedy():
    with pytest.raises(ValueError, match="exceeds the 3 candidates"):
        flfa(num_layers=4).init(torch.zeros(1), LAYOUT)
    with pytest.raises(ValueError, match="flfa: no trained linear or convolution layer '9'"):
        flfa(candidates=["9"]).init(torch.zeros(1), LAYOUT)
    with pytest.raises(ValueError, match="no candidates are left"):
        flfa(candidates=["0"], first_layer=False).init(torch.zeros(1), LAYOUT)


def test_weight_of_zeros_is_warned_of_once_and_stays_the_feedback():
    """A chosen layer that is 0 when the round starts lets no error pass, wherever local steps take its weight."""
    layers = list(candidate_layers(LAYOUT, "all", first_layer=True))
    start = torch.zeros(LAYOUT.num_state)
    LAYOUT.view(start, "1.weight").fill_(0.1)

    def forward(layer, **options):
        client = SimpleNamespace(
            layout=LAYOUT, start=start, params=start[: LAYOUT.num_params], round_index=1,
            message={"layers": [layers.index(layer)]}, model=SimpleNamespace(module=MODULE),
        )  # fmt: skip
        return flfa(**options).forward({}, client)[layer]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            op = forward("3")
        forward("1")
        forward("3", feedback="random")
    (warning,) = caught
    assert "flfa: all of '3' is 0 at the start of the round" in str(warning.message)
    x = torch.randn(2, 8, requires_grad=True)
    op(MODULE[3], x).sum().backward()
    assert not x.grad.any()


def test_direct_feedback_gives_the_chosen_layer_the_output_error(root):
    """The gradient below the layer is that of e R at its input; its own, and everything above, stay exact."""
    groups = {"cohort": {"size": 3}, "rounds": 2}
    plain, other = (
        server_on(steps_plan(root, methods, steps=1, **groups), root)
        for methods in ([], [only("fc1", feedback="direct", seed=4)])
    )
    for server in (plain, other):
        server.run_round(0)
    assert plain.params_sha256() == other.params_sha256()
    start = {name: value.clone() for name, value in plain.layout.views(plain.state).items()}
    cohorts = [server.run_round(1).clients for server in (plain, other)]
    moved = [{n: v - start[n] for n, v in s.layout.views(s.state).items()} for s in (plain, other)]
    for name in start:
        assert torch.equal(moved[0][name], moved[1][name]) == (not name.startswith("conv")), name
    assert cohorts[0]["client"].tolist() == cohorts[1]["client"].tolist()

    trainer = other.pool._trainer
    model, expected = trainer.model, dict.fromkeys(("conv1.weight", "conv2.weight", "conv2.bias"), 0.0)
    sizes = cohorts[0]["num_examples"]
    for client, size in zip(cohorts[0]["client"].tolist(), sizes, strict=True):
        images, labels = trainer.data.federation.client(client)
        order = torch.randperm(len(labels), generator=torch_generator(derive_seed(3, "batches", 1, client)))[:16]
        x, y = trainer.transform(torch.from_numpy(images.copy())[order]), torch.from_numpy(labels.copy())[order]
        module = copy.deepcopy(model.module)
        for name, parameter in module.named_parameters():
            parameter.data, parameter.grad = start[name].clone(), None
        kept = []
        handle = module.fc1.register_forward_pre_hook(lambda _, inputs, kept=kept: kept.append(inputs[0]))
        logits = module(x)
        handle.remove()
        error = (logits.softmax(1) - F.one_hot(y, logits.shape[1])) / len(y)
        (h,) = kept
        width = h[0].numel()
        draw = torch.rand(logits.shape[1], width, generator=torch_generator(derive_seed(4, "direct/fc1")))
        h.backward((error.detach() @ ((2 * draw - 1) / width**0.5)).view(h.shape))
        for name in expected:
            grad = module.get_parameter(name).grad
            expected[name] = expected[name] - 0.1 * float(size / sizes.sum()) * grad
    for name, want in expected.items():
        assert float((moved[1][name] - want).norm()) < 1e-4 * float(want.norm()), name


def test_direct_feedback_of_the_first_layer_and_of_all_candidates(root):
    assert digest(root, [only("conv1", feedback="direct")]) == digest(root, [])
    found = server_on(plan_of(root, [{"flfa": {"feedback": "direct"}}]), root)
    for index in range(3):
        record = found.run_round(index)
    assert record.arrays["flfa.agreement:columns"].tolist() == ["conv1", "conv2", "fc1", "fc2"]


def cuts():
    """No error passes the head: nothing below it moves."""

    def forward(ops, client):
        weight = client.layout.view(client.start, "fc2.weight")
        return {**ops, "fc2": feedback_op(client, "fc2", torch.zeros_like(weight), "none")}

    return Method("cuts", forward=forward)


def test_fedvg_scores_by_plain_backpropagation(root):
    """Training under an override that lets no error pass; the scoring gradient below it is there all the same."""
    server = server_on(plan_of(root, ["tests.methods.test_flfa:cuts", "fedvg"]), root)
    before = {name: value.clone() for name, value in server.layout.views(server.state).items()}
    norms = server.run_round(0).arrays["fedvg.norms"]
    values = server.layout.views(server.state)
    names = [leaf.name for leaf in server.layout.params]
    for index, name in enumerate(names):
        is_head = name.startswith("fc2")
        assert torch.equal(values[name], before[name]) != is_head, name
        assert (norms[:, index] > 0).all(), name


def test_evaluation_does_not_see_the_override(root):
    plain = server_on(plan_of(root), root)
    server = server_on(plan_of(root, [only("fc1")]), root)
    server.state = plain.state.clone()
    assert server.evaluate() == plain.evaluate()


def test_rounds_that_are_plain_backpropagation_are_counted_and_the_first_is_warned_of():
    def told(method, states=(None,)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for state in states:
                _, view = choose(method, [one, -one], state)  # a tie, on every CPU: the first candidate
        return [str(warning.message) for warning in caught], view.logged["is_plain"]

    one, again = updates(1)[0], {"layers": [0], "strategy": "lowest"}
    (line,), is_plain = told(flfa(), [None, again, again])
    assert "the chosen layer '0' is the first" in line
    assert is_plain == 1
    assert told(flfa(), [{"layers": [1], "strategy": "lowest"}])[1] == 0
    assert told(flfa(num_layers=2), [{"layers": [0, 1], "strategy": "lowest"}]) == ([], 0)
    assert told(flfa(first_layer=False)) == ([], 1)  # round 0, and then the second layer
