"""Metrics of a run: by domain, on clients' own rows, on further test sets, on the validation set, and of one's own."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, f1_score, roc_auc_score
from torch import nn

import raysim
from raysim.base.errors import ConfigError
from raysim.config import StopGroup
from raysim.core.layout import layout_of
from raysim.data.arrow import PreparedSet, write_set
from raysim.data.readers.reader_options import ReaderOptions
from raysim.data.readers.shapes import STYLES
from raysim.data.rows import in_batches
from raysim.data.sources import prepare, set_path
from raysim.engine import round_metrics
from raysim.engine.round_metrics import client_columns, cohort_metrics, evaluation, spread_of
from raysim.engine.schedule import ClientBlock
from raysim.plan.build import make_trainer, open_federation
from raysim.plan.check import check
from raysim.plan.find import further_metrics
from raysim.running.record import judged, reason_to_stop
from raysim.running.runner import execute
from raysim.training.evaluate import Score
from tests.support.federations import plan_of, raw_config, recipe_of, run, server_on
from tests.support.task_sets import VOCABULARY, contents, task_config, write_task_set, write_task_sets

NO_FUNCTION = 3


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """A data root with 1,600 shapes of 8 x 8 pixels in four domains, and digits."""
    folder = tmp_path_factory.mktemp("shapes")
    prepare("shapes", folder, options=ReaderOptions(count=1600, size=8))
    prepare("digits", folder)
    return folder


def predictions_of(server, plan, root, name):
    """(logits, labels) of the server's model on a held-out set, without the engine's evaluation."""
    images, labels = open_federation(recipe_of(plan, root)).held_out(name)
    model = server.pool._trainer.model
    model.load(server.state, server.counters)
    model.module.eval()
    with torch.no_grad():
        x = torch.from_numpy(images.copy()).permute(0, 3, 1, 2).float() / 255
        return model.module(x).numpy(), labels


def test_clients_that_are_domains_get_the_accuracy_of_their_domain(shapes):
    """By classes alone every client here is expected at the mean accuracy, whatever its domain."""
    groups = {"data": {"name": "shapes"}, "partition": {"scheme": "domain", "num_clients": 4}, "cohort": {"size": 4}}
    plan = plan_of(shapes, **groups)
    federation = open_federation(recipe_of(plan, shapes))
    labels = federation.held_out("test")[1]
    images = PreparedSet(set_path(shapes, "shapes"))
    domains = images.domains[plan.manifest.test]
    draws = np.random.default_rng(0).uniform(size=len(labels))
    hits = draws < np.array([0.9, 0.6, 0.3, 0.0])[domains]
    predictions, confidences = np.where(hits, labels, (labels + 1) % 10), np.full(len(labels), 0.5)
    score = Score({"labels": labels, "predictions": predictions, "confidences": confidences}, 0.0)
    metrics, _ = evaluation({"test": score}, federation, 10, {})
    for index, name in enumerate(STYLES[:4]):
        assert metrics[f"server/accuracy_domain_{name}"] == pytest.approx(hits[domains == index].mean(), abs=1e-12)
    wanted = []
    for mine in plan.manifest.clients:  # naively: each training example counts the accuracy of its domain and class
        cells = zip(images.domains[mine], images.labels[mine], strict=True)
        wanted.append(np.mean([hits[(domains == d) & (labels == c)].mean() for d, c in cells]))
    assert max(wanted) - min(wanted) > 0.7
    assert metrics["clients/expected_accuracy_worst"] == pytest.approx(min(wanted), abs=1e-12)
    assert metrics["clients/expected_accuracy_mean"] == pytest.approx(np.mean(wanted), abs=1e-12)
    assert metrics["clients/expected_accuracy_p10"] == pytest.approx(np.quantile(wanted, 0.1), abs=1e-12)
    assert not any(name.startswith("clients/accuracy") for name in metrics)


def test_clients_with_own_test_rows_are_scored_on_them(root):
    plan = plan_of(root, data={"split_within_clients": True}, partition={"alpha": 0.1, "min_samples": 20})
    server = run(plan, root, rounds=2)
    metrics = server.evaluate()
    logits, labels = predictions_of(server, plan, root, "test")
    hits, ends = logits.argmax(1) == labels, np.cumsum(plan.manifest.test_sizes)
    assert ends[-1] == len(hits)
    own = [part.mean() for part in np.split(hits, ends[:-1])]
    assert metrics["clients/accuracy_mean"] == pytest.approx(np.mean(own), abs=1e-12)
    assert metrics["clients/accuracy_worst"] == pytest.approx(min(own), abs=1e-12)
    assert metrics["clients/accuracy_p10"] == pytest.approx(np.quantile(own, 0.1), abs=1e-12)
    assert not any("expected" in name for name in metrics)


def test_own_test_rows_are_the_clients(root):
    """What a client has for testing was cut from its own part: its mix of classes, not the set's."""
    plan = plan_of(root, data={"split_within_clients": True}, partition={"alpha": 0.05, "min_samples": 20})
    labels = PreparedSet(set_path(root, "digits")).labels
    rows = np.split(plan.manifest.test, np.cumsum(plan.manifest.test_sizes)[:-1])
    for mine, tested in zip(plan.manifest.clients, rows, strict=True):
        seen = np.bincount(labels[mine], minlength=10) / len(mine)
        assert seen[labels[tested]].mean() > 0.3  # at random it would be 0.1
        assert plan.manifest.spec.within_clients


def test_personal_models_are_scored_on_own_rows_where_there_are_some(root):
    groups = {"data": {"split_within_clients": True}, "partition": {"alpha": 0.1, "min_samples": 20}}
    plan = plan_of(root, ["tests.support.toys:personal_head"], **groups)
    server = server_on(plan, root)
    record = server.run_round(0)
    images, labels = open_federation(recipe_of(plan, root)).held_out("test")
    fresh = server_on(plan, root)
    message, trainer, own = fresh._broadcast(0, 0)[0], fresh.pool._trainer, []
    ends = np.cumsum(plan.manifest.test_sizes)
    for client in record.clients["client"].tolist():
        trainer.train(message, [ClientBlock(0, (client,), 1)], [None])
        trainer.model.module.eval()
        part = slice(ends[client] - plan.manifest.test_sizes[client], ends[client])
        with torch.no_grad():
            x = torch.from_numpy(images[part].copy()).permute(0, 3, 1, 2).float() / 255
            own.append((trainer.model.module(x).argmax(1).numpy() == labels[part]).mean())
    assert record.metrics["clients/personal_accuracy_mean"] == pytest.approx(np.mean(own), abs=1e-12)
    assert record.metrics["clients/personal_accuracy_worst"] == pytest.approx(min(own), abs=1e-12)
    assert record.metrics["clients/personal_accuracy_p10"] == pytest.approx(np.quantile(own, 0.1), abs=1e-12)


def test_one_pass_gives_scikit_learns_metrics(root):
    plan = plan_of(root, evaluation={"metrics": ["auroc", "tests.engine.test_round_metrics:top_2"]})
    server = server_on(plan, root)
    record = [server.run_round(index) for index in range(plan.num_rounds)][-1]
    metrics, confusion = record.metrics, record.confusion
    logits, labels = predictions_of(server, plan, root, "test")
    chances = torch.from_numpy(logits).double().softmax(1).numpy()
    assert metrics["server/macro_f1"] == pytest.approx(f1_score(labels, logits.argmax(1), average="macro"))
    assert metrics["server/auroc"] == pytest.approx(roc_auc_score(labels, chances, multi_class="ovr"))
    assert metrics["server/top_2"] == (np.argsort(logits, 1)[:, -2:] == labels[:, None]).any(1).mean()
    assert (confusion == confusion_matrix(labels, logits.argmax(1))).all()
    assert confusion.trace() == round(metrics["server/accuracy"] * len(labels))


def test_the_confusion_matrix_of_very_many_classes_is_not_kept(root, monkeypatch):
    monkeypatch.setattr(round_metrics, "MOST_CLASSES", 9)
    plan = plan_of(root, rounds=1)
    record = server_on(plan, root).run_round(0)
    assert record.confusion is None
    assert 0 < record.metrics["server/macro_f1"] < 1


def top_2(labels, logits):
    """A metric of one's own."""
    assert labels.dtype == np.int64
    assert logits.dtype == np.float32
    return (np.argsort(logits, 1)[:, -2:] == labels[:, None]).any(1).mean()


def writes(labels, logits):
    """A metric that leaves nothing as it was."""
    logits.fill(0.0)
    labels.fill(0)
    return 0.0


def test_a_metric_that_writes_into_what_it_gets_changes_no_other(root):
    names = ["tests.engine.test_round_metrics:writes", "tests.engine.test_round_metrics:top_2", "auroc"]
    metrics = further_metrics(plan_of(root, evaluation={"metrics": names}).config)
    labels, logits = np.array([0, 1, 1, 2]), np.eye(4, 3, dtype=np.float32)
    kept = labels.copy(), logits.copy()
    for metric in metrics.values():
        metric(labels, logits)
    assert (labels == kept[0]).all()
    assert (logits == kept[1]).all()


def test_metrics_do_not_depend_on_the_trainers(root, ray_pools):
    plan = plan_of(root, evaluation={"metrics": ["auroc"]}, rounds=1)
    servers = [server_on(plan, root), *(server_on(plan, root, pool) for pool in ray_pools(plan)[1:])]
    found = []
    for server in servers:
        metrics = server.run_round(0).metrics
        found.append({name: value for name, value in metrics.items() if name.startswith(("server/", "clients/"))})
    assert found[0] == found[1] == found[2]
    assert {"server/auroc", "server/validation_accuracy", "server/calibration_error"} <= set(found[0])


def test_faults_of_metrics_name_the_remedy(root):
    cases = {
        "aurok": "Did you mean 'auroc'",
        "nowhere:function": "cannot import",
        "tests.engine.test_round_metrics:NO_FUNCTION": "must be a function",
        "tests.engine.test_round_metrics:accuracy": "server/accuracy is recorded already",
    }
    for name, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            plan_of(root, evaluation={"metrics": [name]})


def accuracy(labels, logits):
    """A metric with a name that is taken."""
    return 0.0


# --- further test sets ------------------------------------------------------------------------------------------------


def test_further_test_sets_are_scored_beside_the_sets_own(root, tmp_path):
    prepare("digits", tmp_path)
    digits = PreparedSet(set_path(tmp_path, "digits"))
    images, labels = digits.whole()
    classes, order = list(digits.info.classes), [3, 1, 7]  # three of the classes, in another order
    rows = np.flatnonzero(np.isin(labels, order))[:200]
    theirs = np.array([order.index(label) for label in labels[rows]])
    write_set(set_path(tmp_path, "some"), "some", [classes[c] for c in order], in_batches(images[rows], theirs))
    plain = run(plan_of(tmp_path), tmp_path)
    plan = plan_of(tmp_path, data={"test_sets": ["some"]})
    server = run(plan, tmp_path)
    assert server.params_sha256() == plain.params_sha256()
    metrics = server.evaluate()
    logits, own = predictions_of(server, plan, tmp_path, "test-some")
    assert (own == labels[rows]).all()  # in the set's own classes
    assert metrics["server/accuracy_some"] == (logits.argmax(1) == own).mean()
    assert metrics["server/accuracy"] == plain.evaluate()["server/accuracy"]


@pytest.mark.parametrize("task", ["labels", "tokens"])
def test_a_further_test_set_with_outputs_in_another_order_is_refused(task, tmp_path):
    """Its targets, and tokens, are numbered in its own order."""
    name = write_task_set(tmp_path, task)
    info = PreparedSet(set_path(tmp_path, name)).info
    inputs, targets = contents(task, seed=1)
    more = {"vocabulary": VOCABULARY} if task == "tokens" else {}
    for other, classes in (("same", info.classes), ("turned", info.classes[::-1])):
        raysim.arrays(inputs, targets, name=other, classes=classes, root=tmp_path, **more)
    check(task_config(tmp_path, task, data={"test_sets": ["same"]}), "a test")
    with pytest.raises(ConfigError, match=rf"outputs {info.classes[-1]}, .* in the same order"):
        check(task_config(tmp_path, task, data={"test_sets": ["turned"]}), "a test")


def test_a_set_that_was_prepared_again_with_other_names_or_shapes_is_another(tmp_path):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 255, (40, 8, 8, 1), np.uint8), np.arange(40) % 2
    checksums = []
    for names in (("a", "b"), ("b", "a")):
        for name, classes in (("own", ("a", "b")), ("other", names)):
            write_set(set_path(tmp_path, name), name, classes, in_batches(images, labels))
        data = {"name": "own", "root": str(tmp_path), "test_sets": ["other"]}
        raw = raw_config(tmp_path, [], data=data, partition={"scheme": "iid", "num_clients": 2}, cohort={"size": 2})
        checksums.append(check(raw, "a test").manifest.checksum)
    rows = rng.normal(size=(40, 16)).astype(np.float32)
    for shape in ((4, 4), (2, 8)):
        shutil.rmtree(tmp_path / "rows", ignore_errors=True)
        raysim.arrays(rows.reshape(40, *shape), labels, name="rows", root=tmp_path)
        raw = raw_config(tmp_path, [], data={"name": "rows", "root": str(tmp_path)}, model={"name": "mlp", "hidden": 4})
        raw |= {"partition": {"scheme": "iid", "num_clients": 2}, "cohort": {"size": 2}}
        checksums.append(check(raw, "a test").manifest.checksum)
    assert len(set(checksums)) == 4


def mean_distance(targets, logits):
    return float(np.abs(targets - logits).mean())


def test_a_metric_of_ones_own_gets_the_targets_of_its_task(tmp_path):
    write_task_sets(tmp_path)
    metric = f"{__name__}:mean_distance"
    plan = check(task_config(tmp_path, "regression", evaluation={"metrics": [metric]}), "a test")
    server = run(plan, tmp_path)
    data = open_federation(recipe_of(plan, tmp_path)).held_out("test")
    with torch.no_grad():
        module = make_trainer(recipe_of(plan, tmp_path)).model
        module.load(server.state, server.counters)
        outputs = module.apply(module.params, torch.from_numpy(data[0].copy())).logits.numpy()
    assert server.evaluate()["server/mean_distance"] == pytest.approx(mean_distance(data[1], outputs), rel=1e-5)
    for task, name, words in (
        ("labels", "auroc", "server/auroc is recorded already"),
        ("regression", "auroc", "needs one class a row"),
        ("tokens", metric, "not kept for tokens"),
    ):
        with pytest.raises(ConfigError, match=words):
            check(task_config(tmp_path, task, evaluation={"metrics": [name]}), "a test")


def test_faults_of_further_test_sets_name_the_remedy(shapes):
    for sets, message in (
        (["digits"], "is tested on already"),
        (["shapes"], "10 classes are missing in 'digits'"),
        (["nothing"], "no prepared set 'nothing'"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(raw_config(shapes, data={"name": "digits", "test_sets": sets}), "a test")


# --- the validation set -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_is_chosen_by_its_validation_set(root, tmp_path):
    raw = raw_config(root, storage=str(tmp_path), name="a", rounds=4)
    summary = execute(check(raw, "a test"), on_start=lambda *a: None, on_round=lambda r: None)
    with open(tmp_path / "a" / "progress.csv") as file:
        header, *lines = [line.rstrip("\n").split(",") for line in file]
    rows = [dict(zip(header, line, strict=True)) for line in lines]
    scores = [(float(row["server/validation_accuracy"]), -int(row["round"])) for row in rows]
    chosen = -max(scores)[1]
    assert summary["best_validation_round"] == chosen
    assert summary["accuracy_at_best_validation"] == float(rows[chosen]["server/accuracy"])
    assert summary["metrics"]["server/macro_f1"] == float(rows[-1]["server/macro_f1"])
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["best_validation_accuracy"] == max(scores)[0]
    none = raw_config(root, storage=str(tmp_path), name="b", rounds=1, data={"validation": 0, "root": str(root)})
    summary = execute(check(none, "a test"), on_start=lambda *a: None, on_round=lambda r: None)
    assert summary["accuracy_at_best_validation"] is None
    assert summary["accuracy"] is not None


def test_validation_accuracy_is_that_of_the_validation_set(root):
    plan = plan_of(root)
    server = run(plan, root)
    logits, labels = predictions_of(server, plan, root, "validation")
    assert server.evaluate()["server/validation_accuracy"] == (logits.argmax(1) == labels).mean()


def test_the_first_of_several_best_validation_rounds_counts():
    validation, test = [0.5, 0.7, 0.7, 0.6], [0.1, 0.2, 0.3, 0.4]
    rows = [
        {"round": str(i), "server/validation_accuracy": str(v), "server/accuracy": str(t)}
        for i, (v, t) in enumerate(zip(validation, test, strict=True))
    ]
    found = judged(rows, 4)
    assert (found["accuracy_at_best_validation"], found["best_validation_round"]) == (0.2, 1)
    assert (found["best_accuracy"], found["accuracy"], found["best_round"]) == (0.4, 0.4, 3)


def test_what_was_once_the_last_round_counts_for_nothing_in_a_longer_run():
    """Every third round is evaluated, and round 4 was the last one before the run was made longer."""
    scores = ["", "", "0.1", "0.9", "", "0.2", "", "0.3"]
    rows = [{"round": str(index), "server/accuracy": score} for index, score in enumerate(scores)]
    assert judged(rows[:4], 4, every=3)["best_accuracy"] == 0.9
    found = judged(rows, 8, every=3)
    assert (found["best_accuracy"], found["best_round"], found["accuracy"]) == (0.3, 7, 0.3)
    assert judged(rows, 8, every=0)["best_accuracy"] == 0.3
    timed = [{**row, "system/round_s": "1.0"} for row in rows]
    assert not reason_to_stop(StopGroup(score=0.5), timed[:6], 3)


def test_accuracies_of_a_run_are_those_of_the_rounds_they_are_named_after():
    scores = [0.1, 0.9, 0.3, 0.9, 0.2, *[0.4] * 12, 0.5, 0.8, 0.6]  # 20 rounds: the last two are 10 %
    rows = [{"round": str(index), "server/accuracy": str(score)} for index, score in enumerate(scores)]
    found = judged(rows, 20)
    assert (found["best_accuracy"], found["best_round"]) == (0.9, 1)
    assert found["mean_last_10pct_accuracy"] == pytest.approx(0.7)
    assert found["accuracy"] == 0.6


def test_training_loss_is_the_mean_over_all_steps_of_the_kept_clients(root):
    reports = SimpleNamespace(
        client=np.arange(4),
        num_steps=np.array([1, 3, 0, 4]),
        train_loss=np.array([2.0, 4.0, np.nan, 9.0]),
        sent_bytes=np.array([100, 200, 300, 400]),
        peaks={"update": None, "a/b": None},
        methods={"a": {"n": np.zeros(4)}},
        personal=None,
    )
    cohort = SimpleNamespace(reports=reports, clients=np.arange(4), is_kept=np.array([True, True, True, False]))
    layout = plan_of(root).layout
    message = SimpleNamespace(fields={"a": {"v": np.zeros(5)}}, params_bytes=None)
    found = cohort_metrics(cohort, message, layout, SimpleNamespace(num_test=0))
    size = 4 * layout.num_params
    assert found == pytest.approx(
        {
            "train/loss": (2 + 3 * 4) / 4,
            "comm/up_mb": (1000 + 4 * size + 32) / 1e6,
            "comm/down_mb": 4 * (size + 40) / 1e6,
            "clients/dropped": 1,
        }
    )


def test_a_dropped_client_has_no_weight_and_the_others_their_mean_over_the_leaves():
    layout = layout_of(nn.Sequential(nn.Linear(2, 1)), head="0")  # a weight of 2 numbers and a bias of 1
    names = ("client", "block", "num_examples", "num_steps", "seconds", "train_loss")
    reports = SimpleNamespace(**{name: np.arange(3) for name in names})
    cohort = SimpleNamespace(clients=np.arange(3), is_kept=np.array([True, False, True]), reports=reports)
    weights = {"0.weight": torch.tensor([0.25, 0.75]).double(), "0.bias": torch.tensor([1.0, 0.0]).double()}
    columns = client_columns(cohort, weights, layout)
    assert columns["weight"].tolist() == [0.5, 0.0, 0.5]
    assert columns["is_dropped"].tolist() == [False, True, False]
    assert client_columns(cohort, {}, layout)["weight"].tolist() == [0.0, 0.0, 0.0]  # a method may leave all out


def test_a_spread_is_mean_tenth_percentile_and_worst_of_known_clients():
    found = spread_of("clients/accuracy", np.array([0.0, 0.1, 0.1, 0.2, np.nan, 1.0]))
    assert found == pytest.approx(
        {"clients/accuracy_mean": 0.28, "clients/accuracy_p10": 0.04, "clients/accuracy_worst": 0.0}
    )
    assert spread_of("clients/accuracy", np.array([np.nan])) == {}
