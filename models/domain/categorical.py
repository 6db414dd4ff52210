"""Names that many setups share, as whole numbers into a table of them: what is asked of names is asked once of each."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, overload

import numpy as np

from .numeric import BoolArray, FloatArray, IntArray

Row = TypeVar("Row", bound=Hashable)


def numbered(rows: Iterable[Row]) -> tuple[tuple[Row, ...], IntArray]:
    """The distinct rows as they first appear, and (rows,) which of them each is."""
    places: dict[Row, int] = {}
    codes = [places.setdefault(row, len(places)) for row in rows]
    return tuple(places), np.array(codes, dtype=np.intp)


class Keys(Sequence[str]):
    """A sequence of names: `names[codes[i]]` is the i-th. The table may hold names that no row has, each once."""

    __slots__ = ("codes", "names")

    def __init__(self, names: tuple[str, ...], codes: IntArray) -> None:
        self.names, self.codes = names, codes

    @classmethod
    def of(cls, values: Iterable[str]) -> Keys:
        """The values as they come."""
        return values if isinstance(values, Keys) else cls(*numbered(values))

    @classmethod
    def joined(cls, *parts: Keys) -> Keys:
        """`a|b` row by row. Raises ValueError on parts of other lengths."""
        left, *others = parts
        for right in others:
            if len(left) != len(right):
                raise ValueError(f"{len(left)} names and {len(right)}: they are joined row by row")
            pairs, codes = np.unique(
                left.codes * len(right.names) + right.codes, return_inverse=True
            )
            names = (divmod(pair, len(right.names)) for pair in pairs.tolist())
            left = cls.of(f"{left.names[one]}|{right.names[other]}" for one, other in names).take(
                codes
            )
        return left

    def __len__(self) -> int:
        return len(self.codes)

    def __iter__(self) -> Iterator[str]:
        return iter([self.names[code] for code in self.codes.tolist()])

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Keys: ...
    def __getitem__(self, at: int | slice) -> str | Keys:
        return (
            Keys(self.names, self.codes[at])
            if isinstance(at, slice)
            else self.names[self.codes[at]]
        )

    def __add__(self, other: Keys) -> Keys:
        table = Keys.of((*self.names, *other.names))
        mine, theirs = table.codes[: len(self.names)], table.codes[len(self.names) :]
        return Keys(table.names, np.concatenate([mine[self.codes], theirs[other.codes]]))

    def take(self, picked: IntArray) -> Keys:
        """The rows at these positions, or where a mask holds."""
        return Keys(self.names, self.codes[picked])

    def places(self, known: Mapping[str, int]) -> IntArray:
        """(rows,) what `known` says of each, -1 where it says nothing."""
        table = np.array([known.get(name, -1) for name in self.names], dtype=np.intp)
        return table[self.codes]

    def values(self, value: Callable[[str], float]) -> FloatArray:
        """(rows,) the value of each name; it is asked of those alone that some row has."""
        table = np.zeros(len(self.names))
        for code in self.met:
            table[code] = value(self.names[code])
        return table[self.codes]

    def among(self, known: Container[str]) -> BoolArray:
        """(rows,) is it one of these?"""
        return np.array([name in known for name in self.names], dtype=bool)[self.codes]

    def within(self, other: Keys) -> IntArray:
        """(rows,) codes in the other's table; -1 for names that are not in it. Equal names have equal codes."""
        if self.names is other.names:
            return self.codes
        return self.places({name: code for code, name in enumerate(other.names)})

    @property
    def met(self) -> list[int]:
        """Codes that some row has, in the order of the table."""
        return np.flatnonzero(np.bincount(self.codes, minlength=len(self.names))).tolist()

    @property
    def distinct(self) -> tuple[str, ...]:
        """Names that some row has, in the order of the table."""
        return tuple(self.names[code] for code in self.met)

    def groups(self) -> dict[str, IntArray]:
        """The rows of each name that some row has, in order."""
        order = np.argsort(self.codes, kind="stable")
        ends = np.cumsum(np.bincount(self.codes, minlength=len(self.names)))
        starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        return {self.names[code]: order[starts[code] : ends[code]] for code in self.met}
