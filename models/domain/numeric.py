"""Array types by what they hold, and constants of the normal distribution."""

from __future__ import annotations

import numpy as np

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.intp]]

Z_90 = 1.6448536269514722  # half-width of a central 90 % interval, in standard deviations of a normal
