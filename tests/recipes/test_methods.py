"""The methods of every table's recipe and their options are those that the papers, or their authors' code, print."""

from __future__ import annotations

from inspect import signature
from pathlib import Path

import pytest

from methods.diagnostics import diagnostics
from methods.feedback import feedback_layers
from methods.flfa import flfa
from methods.moon import moon
from methods.univarfl import univarfl
from raysim.base.settings import as_written
from raysim.config import parse_config
from raysim.config.overlays import layered
from raysim.config.sweep import grid
from raysim.core.layout import layout_of
from raysim.models import ModelSpec, build_skeleton, head_of
from raysim.plan.check import check
from raysim.plan.find import build_methods
from raysim.tuning.plan import read_sweep
from tests.support.recipe_files import read_recipe

PAPERS = Path(__file__).parent.parent.parent / "configs" / "papers"


def trials(paper, name):
    """(labels, methods as listed, configuration) of every trial."""
    for trial in grid(read_recipe(PAPERS / paper / f"{name}.yaml"), name):
        config, _ = parse_config(trial.raw)
        yield trial.raw["labels"], as_written(config.methods), config


def defaults(method):
    return {name: parameter.default for name, parameter in signature(method).parameters.items()}


# --- FLFA: the older code's settings (FedProx, MOON, FedAvgM), or those of the methods' own authors -------------------

FLFA_BASES = {
    "FedAvg": [],
    "FedProx": [{"fedprox": {"mu": 0.1}}],
    "MOON": [{"moon": {"mu": 0.1, "temperature": 0.5}}],
    "FedAvgM": [{"fedavgm": {"beta": 0.1, "form": "damped"}}],
    "FedSOL": [{"fedsol": {"rho": 1.0, "temperature": 3.0}}],
    "FedRS": [{"fedrs": {"alpha": 0.5}}],
    "FedLC": [{"fedlc": {"tau": 1.0}}],
    "FedACG": [{"fedacg": {"lam": 0.85, "beta": 0.001}}],
    "FedDyn": [{"feddyn": {"alpha": 0.1}}],
}
FLFA_VARIANTS = {  # table 4
    "BP": [],
    "FLFA": [{"flfa": {"strategy": "lowest"}}],
    "FLFA* (fixed random B)": [{"flfa": {"strategy": "lowest", "feedback": "random"}}],
    "FLFA-dagger (no scaling)": [{"flfa": {"strategy": "lowest", "scale": "none"}}],
    "DFA": [{"flfa": {"strategy": "lowest", "feedback": "direct"}}],
}
SIX = {"FedAvg", "FedProx", "MOON", "FedAvgM", "FedRS", "FedLC"}
EIGHT = SIX | {"FedSOL", "FedACG"}
#: Base methods of each table; tables 4 and 13 are other comparisons.
FLFA_ROWS = {1: EIGHT, 2: {"FedAvg"}, 3: EIGHT, **dict.fromkeys(range(5, 10), SIX), 10: EIGHT, 12: {"FedDyn"}}


def flfa_wanted(number, labels):
    if number == 4:
        return FLFA_VARIANTS[labels["variant"]]
    if number == 13:
        return [{"flfa": {"strategy": labels["strategy"]}}]
    base, plus, _ = labels["method"].partition(" + ")
    own = {2: {"flfa": {"strategy": "lowest"}}, 10: {"flfa": {"num_layers": labels.get("fa_layers")}}}
    return [*FLFA_BASES[base], *([own.get(number, "flfa")] if plus else [])]


@pytest.mark.parametrize("number", [*FLFA_ROWS, 4, 13])
def test_flfa_methods_have_the_printed_options(number):
    seen = set()
    for labels, methods, _ in trials("flfa", f"table_{number}"):
        assert methods == flfa_wanted(number, labels), labels
        seen.add(labels["variant"] if number == 4 else labels["strategy"] if number == 13 else labels["method"])
    bases = FLFA_ROWS.get(number, set())
    want = {f"{base} + FLFA" for base in bases} | (bases if number != 10 else set())
    assert seen == (want or {4: set(FLFA_VARIANTS), 13: {"lowest", "highest"}}[number])


#: data.normalise, data.augment: the older code's, and for MedMNIST what the header says.
FLFA_INPUTS = {
    **dict.fromkeys(("bloodmnist", "organcmnist", "organsmnist", "pathmnist"), ("half", "none")),
    "fashion_mnist": ("fashion-mnist", "flfa"),
    "cifar10": ("cifar10", "flfa"),
    "cifar100": ("cifar100", "flfa"),
    "imagenet100": ("imagenet", "flfa"),
}


def test_flfa_inputs_and_choices_are_those_that_the_header_names():
    seen = {}
    for number in (1, 3):
        for labels, _, config in trials("flfa", f"table_{number}"):
            data, part = config.data, config.partition
            seen[data.name] = data.normalise, data.augment
            assert part.seed is None  # drawn anew by every seed
            assert config.model.pretrained is None
            assert labels["method"] != "MOON" or defaults(moon)["first"] == "none"
    assert seen == FLFA_INPUTS
    header = " ".join((PAPERS / "flfa" / "base.yaml").read_text().partition("\nseed:")[0].split()).replace("# ", "")
    for words in (
        "The older code has no MedMNIST: pixels go to [-1, 1], as in MedMNIST's own examples, without augmentation",
        "Networks start with random weights",
        "Every seed draws new initial weights, partition and cohorts",
        "Momentum starts at 0 in every round",
        "one factor per layer",
        "MOON has no contrastive term before a client has trained once",
        "raysim prepare imagenet100 --root FILES --size 64",
    ):
        assert words in header, words


def test_flfa_scaffold_is_its_authors_with_and_without_flfa():
    seen = {labels["method"]: methods for labels, methods, _ in trials("flfa", "scaffold")}
    assert seen == {"SCAFFOLD": ["scaffold"], "SCAFFOLD + FLFA": ["scaffold", "flfa"]}


@pytest.mark.slow
def test_every_layer_of_mobilenetv2_has_its_run():
    tried = []
    for labels, methods, config in trials("flfa", "layers"):
        spec = ModelSpec(config.model.name, 10, (32, 32, 3), dict(config.model.model_extra))
        layout = layout_of(build_skeleton(spec), head=head_of(spec))
        tried += [option for method in methods for option in method["flfa"]["candidates"]]
        assert methods == [] or tried[-1] == labels["layer"]
    assert tried == list(feedback_layers(layout))


def test_figure_3_is_measured_in_every_round():
    for labels, methods, _ in trials("flfa", "figure_2"):
        assert methods[-1] == {"diagnostics": {"measures": ["drift", "features"]}}
        assert methods[:-1] == ([{"flfa": {"strategy": "lowest"}}] if "FLFA" in labels["method"] else [])
    assert defaults(diagnostics)["every"] == 1


# --- what recipes name for others ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paper", "name", "axis"),
    [("fedvg", "table_A3", "method"), ("flfa", "table_1", "method"), ("univarfl", "table_1", "case")],
)
def test_settings_that_can_be_added_to_a_recipe_are_sound(paper, name, axis):
    raw = read_recipe(PAPERS / paper / f"{name}.yaml")
    raw["tune"]["param_space"][axis] = {"grid_search": list(raw["tune"]["settings"][axis])}
    raw["tune"]["param_space"]["seed"] = {"grid_search": [0]}
    for trial in grid(raw, name):
        assert not parse_config(trial.raw)[1] + build_methods(trial.raw.get("methods", []))[1], trial.name


def test_flfa_by_default_is_the_papers():
    """One layer a round, by the skewness rule, with the weight at the round's start, rescaled as a whole."""
    found = defaults(flfa)
    assert (found["num_layers"], found["strategy"], found["feedback"], found["scale"]) == (1, "auto", "round", "layer")


# --- UniVarFL ---------------------------------------------------------------------------------------------------------

UNIVARFL = {
    "FedAvg": [],
    "FedProx": [{"fedprox": {"mu": 0.01}}],
    "MOON": [{"moon": {"mu": 1.0, "temperature": 0.5, "first": "random"}}],  # as in its code, which the paper used
    "Freeze": ["freeze"],
    "UniVarFL": [{"univarfl": {"mu": 0.5, "eps": 1.0}}],
}
UNIVARFL_ALONE = {  # the ablation, which is not published
    "UniVarFL, mu = 0": [{"univarfl": {"mu": 0}}],
    "UniVarFL, lambda = 0": [{"univarfl": {"mu": 0.5, "eps": 1.0, "lam": 0}}],
    "UniVarFL, epsilon = 0.1": [{"univarfl": {"mu": 0.5, "eps": 0.1}}],
    "UniVarFL, epsilon = 0.01": [{"univarfl": {"mu": 0.5, "eps": 0.01}}],
    "UniVarFL, literal": [{"univarfl": {"mu": 0.5, "eps": 1.0, "form": "literal"}}],
    "UniVarFL, 1/K": ["uniform", {"univarfl": {"mu": 0.5, "eps": 1.0}}],
    "FedUV's terms": [{"univarfl": {"mu": 0.5, "variance": "unbiased", "spread": "deviation", "uniformity": "kernel"}}],
    **{name: UNIVARFL[name] for name in ("FedAvg", "UniVarFL")},
}
UNIVARFL_SPEED = {  # named beside the claim of speed
    "SCAFFOLD": ["scaffold"],
    "FedDyn": [{"feddyn": {"alpha": 0.1}}],
    "FedAlign": [{"fedalign": {"mu": 0.45, "width": 0.25}}],
    **{name: UNIVARFL[name] for name in ("FedAvg", "FedProx", "MOON", "UniVarFL")},
}
#: split, test, validation, augmentation, side that images are brought to. 10 % of the training file is validation.
UNIVARFL_DATA = {
    "STL-10": ("official", 0.1, "univarfl-stl10", None),
    "CIFAR-100": ("official", 0.1, "none", None),
    "PACS": ("fraction", 0.1, "none", 64),
    "HAM10000": ("fraction", 0.1, "none", 64),
}


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("table_1", UNIVARFL),
        ("table_2", UNIVARFL),
        ("open_choices", UNIVARFL),
        ("ablation", UNIVARFL_ALONE),
        ("speed", UNIVARFL_SPEED),
    ],
)
def test_univarfl_methods_and_data_have_the_printed_options(name, methods):
    seen = set()
    for labels, found, config in trials("univarfl", name):
        assert found == methods[labels["method"]], labels
        data = config.data
        assert (data.split, data.validation, data.augment, data.resize) == UNIVARFL_DATA[labels["dataset"]], labels
        assert data.split == "official" or data.test == 0.1
        assert data.normalise == "half"
        assert config.local.max_grad_norm == (10 if labels["method"] == "FedAlign" else None)
        seen.add(labels["method"])
    assert seen == set(methods)
    assert (defaults(univarfl)["mu"], defaults(univarfl)["lam"]) == (0.5, None)  # None is D/4


def test_univarfls_claim_of_speed_is_measured():
    """Time, and rounds to FedAvg's accuracy, of every method that the paper names there."""
    report = read_recipe(PAPERS / "univarfl" / "speed.yaml")["report"]
    assert (report["time"], report["target"]) == ("FedAvg", "FedAvg")


def test_univarfls_rounds_and_epochs_vary_and_every_run_measures_the_gradient():
    """Theorem 1 bounds the smallest gradient by 1 / sqrt(T E): the paper's T and E, others of the same product, and others."""
    schedules = set()
    for labels, methods, config in trials("univarfl", "rounds_and_epochs"):
        assert (config.rounds, config.local.epochs) == (labels["T"], labels["E"])
        assert methods == [
            *UNIVARFL[labels["method"]],
            {"diagnostics": {"every": config.rounds // 10, "measures": ["gradient"]}},
        ]
        assert config.model.name == "univarfl_cnn"
        schedules.add((labels["T"], labels["E"]))
    assert (100, 10) in schedules
    products = sorted(rounds * epochs for rounds, epochs in schedules)
    assert products == [500, 1000, 1000, 1000, 1000, 2000, 4000]
    assert {epochs for rounds, epochs in schedules if rounds * epochs != 1000} == {10}


def test_univarfl_recipes_hold_both_ways_of_what_the_paper_leaves_open():
    """MOON's and FedUV's cap in the tables, none beside them; PACS and HAM10000 on both networks; a constant rate, and
    FedUV's cosine."""
    shift, networks, schedules = {}, {}, {}
    for name in ("table_1", "table_2", "ablation", "speed", "open_choices"):
        for labels, _, config in trials("univarfl", name):
            choice = labels.get("choice", "")
            schedules.setdefault(choice == "cosine schedule", set()).add(config.local.schedule)
            if "alpha" in labels:
                key = labels["dataset"], labels["alpha"], choice == "uncapped"
                shift.setdefault(key, set()).add(config.partition.form)
            if labels["dataset"] in ("PACS", "HAM10000"):
                networks.setdefault((name, labels["dataset"]), set()).add(config.model.name)
    cases = [(dataset, alpha) for dataset in ("STL-10", "CIFAR-100") for alpha in (0.01, 1.0)]
    assert shift == {(*case, free): {"class" if free else "capped"} for case in cases for free in (False, True)}
    for dataset in ("PACS", "HAM10000"):
        assert networks["table_1", dataset] == {"resnet18"}
        assert networks["open_choices", dataset] == {"univarfl_cnn"}
    assert schedules == {False: {"constant"}, True: {"cosine"}}


# --- LIVAR: baselines as in the framework that the paper's code builds on ---------------------------------------------

LIVAR = {
    "FedAvg": [],
    "RegMean": [{"regmean": {"as_in": "fed-mammoth"}}],
    "FisherAvg": [{"fisher": {"as_in": "fed-mammoth"}}],
    "FedProto": [{"fedproto": {"as_in": "fed-mammoth", "strength": 0.1}}],
    "CCVR": [{"ccvr": {"as_in": "fed-mammoth"}}],
    "LIVAR": ["livar"],
    "LIVAR + CCVR": ["livar", {"ccvr": {"as_in": "fed-mammoth"}}],
    "Joint": [],
}
LIVAR_TABLES = {
    "table_1": set(LIVAR) - {"LIVAR + CCVR"},
    "table_2": set(LIVAR) - {"LIVAR + CCVR"},
    "table_3": {"CCVR", "LIVAR", "LIVAR + CCVR"},
}
LIVAR_PARTS = {  # table 4: layer weighting, head weighting
    ("off", "off"): [{"livar": {"components": "lora", "layers": "examples"}}],
    ("on", "off"): [{"livar": {"components": "lora"}}],
    ("off", "on"): [{"livar": {"layers": "examples"}}],
    ("on", "on"): ["livar"],
}
#: Defaults of the framework's classes, LIVAR's rate from its example: learning rate, weight decay.
LIVAR_STEPS = {
    **dict.fromkeys(("FedAvg", "FisherAvg", "FedProto", "Joint"), (3e-4, 0)),
    "CCVR": (1e-3, 0),
    "RegMean": (1e-5, 0.1),
    **dict.fromkeys(("LIVAR", "LIVAR + CCVR"), (1e-4, 0.1)),
}


@pytest.mark.parametrize("name", LIVAR_TABLES)
def test_livar_methods_have_the_frameworks_options(name):
    seen = set()
    for labels, methods, config in trials("livar", name):
        assert methods == LIVAR[labels["method"]], labels
        assert (config.local.lr, config.local.weight_decay) == LIVAR_STEPS[labels["method"]], labels
        assert config.is_joint == (labels["method"] == "Joint")
        seen.add(labels["method"])
    assert seen == LIVAR_TABLES[name]


def test_livar_components_are_switched_one_by_one():
    seen = set()
    for labels, methods, config in trials("livar", "table_4"):
        parts = labels["layer_importance_weighting"], labels["head_variance_weighting"]
        assert methods == LIVAR_PARTS[parts]
        assert (config.local.lr, config.local.weight_decay) == LIVAR_STEPS["LIVAR"]
        seen.add(parts)
    assert seen == set(LIVAR_PARTS)


LIVAR_SWITCHES = read_recipe(PAPERS / "livar" / "table_4.yaml")["tune"]["settings"]["components"]


def test_livar_components_as_released_differ_in_what_the_release_does():
    """In both positions of the switch the products are scored with n_i / n; variances, where used, are of raw pixels."""
    own = {name: settings for name, settings in LIVAR_SWITCHES.items() if not name.endswith("released")}
    command = "components=" + ",".join(f"{name} as released" for name in own)  # as in the recipe's first lines
    assert command in (PAPERS / "livar" / "table_4.yaml").read_text()
    sweep = grid(read_sweep(PAPERS / "livar" / "table_4.yaml", [command]), "table_4")
    assert len(sweep) == 4 * 5
    for trial in sweep:
        name = trial.values["components"].removesuffix(" as released")
        (ours,), (theirs,) = own[name]["methods"], trial.raw["methods"]
        want = {**({} if ours == "livar" else ours["livar"]), "evaluate": "code"}
        want |= {"variance": "released"} if name in ("head", "both") else {}
        assert theirs == {"livar": want}
        switches = {key: value for key, value in own[name].items() if key != "methods"}
        assert {f"labels.{key}": value for key, value in trial.raw["labels"].items()}.items() >= switches.items()


def test_livar_settings_beyond_the_tables_are_sound():
    raw = read_recipe(PAPERS / "livar" / "table_1.yaml")
    named = raw["tune"]["settings"]["method"]
    raw["tune"]["param_space"] = {"method": {"grid_search": list(named)}, "seed": {"grid_search": [0]}}
    raw["data"]["resize"] = 256  # as the cases have it
    found = {trial.values["method"]: trial.raw for trial in grid(raw, "table_1")}
    assert set(found) > set(LIVAR)
    for name, trial in found.items():
        config, faults = parse_config(trial)
        assert not faults + build_methods(trial.get("methods", []))[1], name
        assert (config.model.lora is None) == (name in LIVAR and "LIVAR" not in name), name
    released = found["LIVAR as released"]["methods"]
    assert released == [{"livar": {"variance": "released", "evaluate": "code"}}]


#: data.split, data.test where it counts, resize, crop, statistics, augmentation: the code's transforms, all bicubic.
LIVAR_DATA = {
    "cifar100": ("official", None, 256, 224, "half", "livar-vit"),
    "imagenet_r": ("fraction", 0.2, 256, 224, "half", "livar-vit"),
    "eurosat": ("official", None, 224, None, "clip", "livar-vit"),
    "cub200": ("official", None, 256, 224, "imagenet", "livar-cub"),
    "tiny_imagenet": ("official", None, 256, 224, "tiny-imagenet", "livar-vit"),
}


def test_livar_images_are_made_as_in_the_released_code():
    seen = set()
    configs = [config for name in ("table_1", "table_2", "table_3", "table_4") for *_, config in trials("livar", name)]
    for path in sorted((PAPERS / "livar").glob("*.yaml")):
        raw = read_recipe(path)
        configs += [parse_config(raw)[0]] if "calibrate" in raw else []
    for config in configs:
        data = config.data
        split = "fraction" if data.split == "auto" else data.split  # it has no official rows, and data.test is given
        test = data.test if split == "fraction" else None
        found = split, test, data.resize, data.crop, data.normalise, data.augment
        assert found == LIVAR_DATA[data.name], data.name
        assert (data.interpolation, data.validation) == ("bicubic", 0)
        seen.add((data.name, "calibrate" in config.model_fields_set))
    assert len(seen) == 9  # four sets in tables, five in calibrations


# --- joint training, a row to add -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["fedvg/table_A3", "flfa/table_1", "univarfl/table_2"])
def test_joint_can_be_added_to_a_recipe(recipe, root):
    path = PAPERS / f"{recipe}.yaml"
    raw = read_recipe(path)
    raw["tune"]["param_space"]["method"] = {"grid_search": ["Joint"]}
    assert all(parse_config(trial.raw)[0].is_joint for trial in grid(raw, str(path)))
    raw["scale"].pop("tune.param_space.method", None)
    (trial,) = grid(layered(raw, {}, str(path), is_scaled=True), str(path))
    plan = check({**trial.raw, "data": {**trial.raw["data"], "root": str(root)}}, str(path))
    assert (plan.config.is_joint, plan.config.methods, len(plan.manifest.clients)) == (True, [], 1)
