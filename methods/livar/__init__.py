"""LIVAR: the method, its formulas, its calibration, and `raysim calibrate`, which makes its table anew."""

from __future__ import annotations

from methods.livar.livar import livar as livar
