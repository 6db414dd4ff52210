"""Store a sequence of repeated names as a table of distinct names and an array of positions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar, overload

import numpy as np

from .numeric import FloatArray, IntArray

Value = TypeVar("Value", bound=Hashable)


def numbered(rows: Iterable[Value]) -> tuple[tuple[Value, ...], IntArray]:
    """Return the distinct rows, and a (rows,) array with the position of each row among them.

    Distinct rows are in order of first appearance.
    """
    places: dict[Value, int] = {}
    codes = [places.setdefault(row, len(places)) for row in rows]
    return tuple(places), np.array(codes, dtype=np.intp)


class Keys(Sequence[str]):
    """A sequence of names, stored as distinct `names` and an array `codes` of positions in `names`.

    Item i of the sequence is `names[codes[i]]`. `names` may contain names that no item uses.
    """

    __slots__ = ("codes", "names")

    def __init__(self, names: tuple[str, ...], codes: IntArray) -> None:
        self.names, self.codes = names, codes

    @classmethod
    def of(cls, values: Iterable[str]) -> Keys:
        """Convert `values` to Keys. An instance of Keys is returned unchanged."""
        return values if isinstance(values, Keys) else cls(*numbered(values))

    def __len__(self) -> int:
        return len(self.codes)

    def __iter__(self) -> Iterator[str]:
        return iter([self.names[code] for code in self.codes.tolist()])

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Keys: ...
    def __getitem__(self, at: int | slice) -> str | Keys:
        if isinstance(at, slice):
            return Keys(self.names, self.codes[at])
        return self.names[int(self.codes[at])]

    def __add__(self, other: Keys) -> Keys:
        """Concatenate two sequences. The `names` of the result are the distinct names of both."""
        table = Keys.of((*self.names, *other.names))
        mine, theirs = table.codes[: len(self.names)], table.codes[len(self.names) :]
        return Keys(table.names, np.concatenate([mine[self.codes], theirs[other.codes]]))

    def take(self, picked: IntArray) -> Keys:
        """Return the items at `picked`, an array of positions or a boolean mask over the items."""
        return Keys(self.names, self.codes[picked])

    def values(self, value: Callable[[str], float]) -> FloatArray:
        """Return an (items,) array with `value(name)` for each item.

        `value` is called once for each name that an item uses.
        """
        table = np.zeros(len(self.names))
        for code in self._used():
            table[code] = value(self.names[code])
        return table[self.codes]

    @property
    def distinct(self) -> tuple[str, ...]:
        """Return the names that at least one item uses, in the order of `names`."""
        return tuple(self.names[code] for code in self._used())

    def groups(self) -> dict[str, IntArray]:
        """Return {name: ascending positions of the items with this name}.

        Names that no item uses are left out.
        """
        order = np.argsort(self.codes, kind="stable")
        ends = np.cumsum(np.bincount(self.codes, minlength=len(self.names)))
        starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        return {self.names[code]: order[starts[code] : ends[code]] for code in self._used()}

    def _used(self) -> list[int]:
        """Return the codes that occur in `codes`, in ascending order."""
        return np.flatnonzero(np.bincount(self.codes, minlength=len(self.names))).tolist()
