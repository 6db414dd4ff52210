"""Encode a sequence of repeated values as its distinct values and an array of positions."""

from collections.abc import Hashable, Iterable
from typing import TypeVar

import numpy as np

from .numeric import IntArray

Value = TypeVar("Value", bound=Hashable)


def numbered(rows: Iterable[Value]) -> tuple[tuple[Value, ...], IntArray]:
    """Return the distinct rows, and the position of each row among them as a (rows,) array.

    The distinct rows are in the order of their first appearance.
    """
    places: dict[Value, int] = {}
    codes = [places.setdefault(row, len(places)) for row in rows]
    return tuple(places), np.array(codes, dtype=np.intp)
