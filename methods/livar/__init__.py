"""LIVAR: the method, its formulas, and `raysim calibrate`, which recomputes the coefficient table."""

from __future__ import annotations

from methods.livar.livar import livar as livar
