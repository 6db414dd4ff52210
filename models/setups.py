"""Setups as arrays, one row a setup, one column a group of equal instances."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .arrays import BoolArray, FloatArray, IntArray
from .keys import Keys, numbered


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupArrays:
    """Parsed setups in rank order; (rows, members) arrays are zero where padded.

    A member is `count` equal instances of the type `names[kind]` (-1: padded), each with `layout` devices of `batch`
    samples. Measured rows have one instance a member; planned ones, which are many and large, as many as are equal.
    """

    workloads: Keys
    names: tuple[str, ...]
    kind: IntArray
    count: FloatArray
    batch: FloatArray
    layout: FloatArray
    accumulation: FloatArray

    @classmethod
    def of(
        cls,
        workloads: Sequence[str],
        types: Sequence[Sequence[str]],
        *,
        batch: FloatArray,
        layout: FloatArray,
        accumulation: FloatArray,
    ) -> SetupArrays:
        """One instance a member: `types[i]` are row i's instance types in rank order."""
        clusters, which = numbered(tuple(row) for row in types)
        places = {name: at for at, name in enumerate(sorted({name for row in clusters for name in row}))}
        kinds = np.full((len(clusters), layout.shape[1]), -1, dtype=np.intp)
        for at, names in enumerate(clusters):
            kinds[at, : len(names)] = [places[name] for name in names]
        kind = kinds[which]
        return cls(
            workloads=Keys.of(workloads),
            names=tuple(places),
            kind=kind,
            count=(kind >= 0).astype(float),
            batch=batch,
            layout=layout,
            accumulation=accumulation,
        )

    @property
    def types(self) -> tuple[tuple[str, ...], ...]:
        """Each row's instance type by member."""
        return tuple(tuple(self.names[one] for one in row if one >= 0) for row in self.kind.tolist())

    @property
    def met_types(self) -> set[str]:
        """Instance types that some row has."""
        return {self.names[at] for at in np.unique(self.kind[self.kind >= 0]).tolist()}

    @property
    def present(self) -> BoolArray:
        """(rows, members): is there an instance?"""
        return self.layout > 0

    @property
    def ranks(self) -> FloatArray:
        """(rows,) devices that take part."""
        return np.asarray((self.count * self.layout).sum(axis=1), dtype=float)

    @property
    def instances(self) -> FloatArray:
        """(rows,) instances that take part."""
        return np.asarray(self.count.sum(axis=1), dtype=float)

    @property
    def samples(self) -> FloatArray:
        """(rows,) samples of one optimizer step."""
        return np.asarray((self.count * self.layout * self.batch).sum(axis=1) * self.accumulation, dtype=float)

    def pairs(self) -> Iterator[tuple[str, str, tuple[IntArray, IntArray]]]:
        """Each workload with each instance type that it meets, and (rows, members) where."""
        code = self._pair
        for one, workload, name in self._met(code):
            rows, members = np.nonzero(code == one)
            yield workload, name, (rows, members)

    def by_pair(self, value: Callable[[str, str], Sequence[float]], padded: Sequence[float]) -> tuple[FloatArray, ...]:
        """(rows, members) each of the values of a workload with an instance type, `padded` where there is none."""
        code = self._pair
        table = np.tile(np.array(padded, dtype=float)[:, None], len(self.workloads.names) * len(self.names) + 1)
        for one, workload, name in self._met(code):
            table[:, one] = value(workload, name)
        return tuple(own[code] for own in table)

    def by_type(self, value: Mapping[str, float], padded: float) -> FloatArray:
        """(rows, members) the value of each member's type, `padded` where there is none."""
        known = np.array([value[name] for name in self.names] + [padded], dtype=float)
        return np.asarray(known[self.kind], dtype=float)

    def take(self, picked: np.ndarray[tuple[int, ...], np.dtype[np.intp]]) -> SetupArrays:
        """The rows at these positions."""
        used = np.flatnonzero((self.kind[picked] >= 0).any(axis=0))
        width = int(used[-1]) + 1 if len(used) else 1
        return SetupArrays(
            workloads=self.workloads.take(picked),
            names=self.names,
            kind=self.kind[picked, :width],
            count=self.count[picked, :width],
            batch=self.batch[picked, :width],
            layout=self.layout[picked, :width],
            accumulation=self.accumulation[picked],
        )

    @property
    def _pair(self) -> IntArray:
        """(rows, members) a number of each workload with each type; the last where padded."""
        many = len(self.names)
        code = self.workloads.codes[:, None] * many + self.kind
        return np.asarray(np.where(self.kind >= 0, code, len(self.workloads.names) * many), dtype=np.intp)

    def _met(self, code: IntArray) -> Iterator[tuple[int, str, str]]:
        many = len(self.workloads.names) * len(self.names)
        for one in np.flatnonzero(np.bincount(code.ravel(), minlength=many + 1)[:many]).tolist():
            yield one, self.workloads.names[one // len(self.names)], self.names[one % len(self.names)]
