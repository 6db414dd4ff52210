"""Encode a sequence of repeated values as its distinct values and an array of positions."""

from collections.abc import Hashable, Iterable
from typing import TypeVar

import numpy as np

from .numeric import IntArray

Value = TypeVar("Value", bound=Hashable)


def distinct_rows(rows: Iterable[Value]) -> tuple[tuple[Value, ...], IntArray]:
    """Return the distinct rows, and for each row its position in the distinct rows.

    For example, `["b", "a", "b"]` gives `("b", "a")` and `[0, 1, 0]`.
    """
    places: dict[Value, int] = {}
    codes = [places.setdefault(row, len(places)) for row in rows]
    return tuple(places), np.array(codes, np.intp)
