"""Define array types, a quantile of the normal distribution, and comparison up to rounding."""

import numpy as np

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.intp]]

Z_90 = 1.6448536269514722  # half-width of a normal's central 90 % interval, in sd

# Relative differences below this value come from the order of additions. They must not decide a
# comparison.
ROUNDING = 1e-6


def to_rounding(values: FloatArray) -> FloatArray:
    """Map positive values to integers, for comparisons that ignore rounding errors.

    The integers are log(values) / ROUNDING, rounded. Values that differ by less than a rounding
    error get the same integer, except at the borders between integers.
    """
    return np.asarray(np.round(np.log(values) / ROUNDING), dtype=float)
