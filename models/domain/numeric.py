"""Define array types, a quantile of the normal distribution, and the tolerance of comparisons."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.intp]

Z_90 = 1.6448536269514722  # half-width of a normal 90 % interval, in standard deviations

# Relative differences below this value are rounding errors. They must not decide a comparison.
ROUNDING = 1e-6


def to_rounding(values: FloatArray) -> FloatArray:
    """Return sort keys for positive `values`, so that rounding errors do not decide the order.

    A key is log(value) / ROUNDING, rounded to a whole number. Values that differ only by rounding
    errors almost always get the same key.
    """
    return np.round(np.log(values) / ROUNDING)
