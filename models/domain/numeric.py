"""Array types, and constants of the normal distribution."""

from __future__ import annotations

import numpy as np

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.intp]]

Z_90 = 1.6448536269514722  # half-width of a central 90 % interval of a normal, in sd

# Smaller relative differences come from the order of additions and decide nothing.
ROUNDING = 1e-6


def first_most(values: FloatArray) -> int:
    """Position of the largest of `values` (n,); of values equal up to rounding, the first."""
    most = float(values.max())
    return int(np.argmax(values >= most - ROUNDING * abs(most)))


def to_rounding(values: FloatArray) -> FloatArray:
    """Logs of positive `values` in whole multiples of ROUNDING."""
    return np.asarray(np.round(np.log(values) / ROUNDING), dtype=float)
