"""Array types, and constants of the normal distribution."""

from __future__ import annotations

import numpy as np

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.intp]]

Z_90 = 1.6448536269514722  # half-width of a central 90 % interval of a normal, in sd

# Smaller relative differences are rounding errors, which must not decide a choice.
ROUNDING = 1e-6


def first_most(values: FloatArray) -> int:
    """Return the first position of the largest of `values` (n,), up to rounding."""
    most = float(values.max())
    return int(np.argmax(values >= most - ROUNDING * abs(most)))


def to_rounding(values: FloatArray) -> FloatArray:
    """Return the logarithms of positive `values` as whole multiples of ROUNDING."""
    return np.asarray(np.round(np.log(values) / ROUNDING), dtype=float)
