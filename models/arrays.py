"""The arrays that the models pass to each other, by what they hold; shapes stand where they are made."""

from __future__ import annotations

import numpy as np

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.intp]]
