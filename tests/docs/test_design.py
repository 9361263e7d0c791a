"""What docs/design.md states of the exact fold, in rational arithmetic."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from raysim.core.layout import layout_of
from raysim.training.aggregate import fold, rounding_constants

PAGE = Path(__file__).parents[2] / "docs" / "design.md"
LAYOUT = layout_of(nn.Sequential(nn.Linear(1, 1, bias=False)), head="0")
NUMBERS = st.floats(-(2.0**60), 2.0**60, width=32)
WEIGHTS = st.floats(2.0**-40, 2.0**40) | st.floats(-(2.0**40), -(2.0**-40))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(NUMBERS, WEIGHTS), min_size=1, max_size=12))
def test_the_theorem_of_the_fold_holds(clients):
    updates = torch.tensor([[number] for number, _ in clients], dtype=torch.float32)
    factors = torch.tensor([weight for _, weight in clients], dtype=torch.float64)
    weights, peaks = {"0.weight": factors}, updates.abs().double()
    total = math.fsum((factors.abs() * peaks[:, 0]).tolist())
    constants = rounding_constants(LAYOUT, weights, peaks)
    got = Fraction(float(fold(LAYOUT, updates, weights, constants)))
    if total == 0:
        assert got == 0
        return
    exponent = math.floor(math.log2(total)) + 1
    exponent += (2.0**exponent <= total) - (2.0 ** (exponent - 1) > total)  # log2 rounds
    grid = Fraction(2) ** (exponent - 51)
    assert float(constants) == 1.5 * 2.0 ** (exponent + 1)
    assert got % grid == 0
    assert abs(got) < 2**52 * grid
    exact = sum(
        Fraction(float(update)) * Fraction(weight) for update, (_, weight) in zip(updates, clients, strict=True)
    )
    bound = (len(clients) * Fraction(2) ** -51 + Fraction(2) ** -53 * (1 + Fraction(2) ** -52)) * Fraction(total)
    assert abs(got - exact) <= bound


def test_links_are_there_and_the_contents_name_every_section():
    text = PAGE.read_text()
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert re.findall(r"^- \[(.+)\]\(#", text, re.MULTILINE) == sections
    for target in re.findall(r"\]\(([^)#\s]+)\)", text):
        assert (PAGE.parent / target).exists(), target
