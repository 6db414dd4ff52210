"""Setups as arrays, and the model's groups: each mode of a workload is a group with a name.

A group's name stays inside this package; callers give a workload and a mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from ..domain.categorical import Keys, numbered
from ..domain.numeric import BoolArray, FloatArray, IntArray
from ..domain.setup_table import column, machines_of, modes_of, types_of
from ..domain.workload import MODE_COLUMNS, MODES, Mode

_IN = " in "
_OTHERS = {str(mode): mode for mode in MODES[1:]}


def variant(workload: str, mode: Mode) -> str:
    """Return the group's name: the workload's own name for DDP in fp32."""
    return workload if mode == MODES[0] else f"{workload}{_IN}{mode}"


def workload_and_mode(name: str) -> tuple[str, Mode]:
    """Return the workload and mode of a group's name."""
    workload, found, mode = name.rpartition(_IN)
    return (workload, _OTHERS[mode]) if found and mode in _OTHERS else (name, MODES[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupArrays:
    """Parsed setups in rank order; (rows, members) arrays are zero where padded.

    A member is `count` equal instances of the type `names[kind]` (-1: padded), each with `layout`
    devices of `batch` samples. Measured rows have one instance a member, planned rows several.
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
        places = {
            name: at for at, name in enumerate(sorted({name for row in clusters for name in row}))
        }
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

    @classmethod
    def planned(
        cls, workload: str, modes: Sequence[Mode], mode: IntArray, **columns: Any
    ) -> SetupArrays:
        """Setups of one workload; `mode` (rows,) numbers `modes`, `columns` are the other
        fields."""
        groups = Keys.of([variant(workload, one) for one in modes])
        return cls(workloads=groups.take(mode), **columns)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The mode of each of `workloads.names`."""
        return tuple(workload_and_mode(name)[1] for name in self.workloads.names)

    def dense(self) -> SetupArrays:
        """The same setups in the modes of plain data parallelism with which theirs are compared."""
        pairs = (workload_and_mode(name) for name in self.workloads.names)
        table = Keys.of([variant(workload, mode.dense) for workload, mode in pairs])
        return replace(self, workloads=table.take(self.workloads.codes))

    @property
    def types(self) -> tuple[tuple[str, ...], ...]:
        """Each row's instance type by member."""
        return tuple(
            tuple(self.names[one] for one in row if one >= 0) for row in self.kind.tolist()
        )

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
        return np.asarray(
            (self.count * self.layout * self.batch).sum(axis=1) * self.accumulation, dtype=float
        )

    def pairs(self) -> Iterator[tuple[str, str, tuple[IntArray, IntArray]]]:
        """Each workload with each instance type that it meets, and (rows, members) where."""
        code = self._pair
        for one, workload, name in self._met(code):
            rows, members = np.nonzero(code == one)
            yield workload, name, (rows, members)

    def by_pair(
        self, value: Callable[[str, str], Sequence[float]], padded: Sequence[float]
    ) -> tuple[FloatArray, ...]:
        """Return (rows, members) of each value by workload and instance type, `padded`
        elsewhere."""
        code = self._pair
        table = np.tile(
            np.array(padded, dtype=float)[:, None], len(self.workloads.names) * len(self.names) + 1
        )
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
        return np.asarray(
            np.where(self.kind >= 0, code, len(self.workloads.names) * many), dtype=np.intp
        )

    def _met(self, code: IntArray) -> Iterator[tuple[int, str, str]]:
        many = len(self.workloads.names) * len(self.names)
        for one in np.flatnonzero(np.bincount(code.ravel(), minlength=many + 1)[:many]).tolist():
            yield (
                one,
                self.workloads.names[one // len(self.names)],
                self.names[one % len(self.names)],
            )


def read_setups(frame: pd.DataFrame, devices: dict[str, int]) -> SetupArrays:
    """Parse the measurement columns; `devices` by instance type stands in for an empty layout.

    A workload in another mode than plain data parallelism in fp32 is another one (`variant`).
    Raises ValueError on a missing column or on text that is not of the contract's form.
    """
    missing = [
        name for name in ("workload", "cluster", "batch_per_device") if name not in frame.columns
    ]
    if missing:
        raise ValueError(f"setups lack the column {missing[0]!r}")
    clusters, batches = (
        [str(value) for value in frame[name].tolist()] for name in ("cluster", "batch_per_device")
    )
    workloads = variants_of(frame)
    layouts = [str(value).strip() for value in column(frame, "layout", "").tolist()]
    texts, which = numbered(zip(clusters, layouts, batches, strict=True))
    parsed = [machines_of(*each, devices) for each in texts]
    width = max((len(used) for used, _ in parsed), default=1)
    layout, batch = np.zeros((len(texts), width)), np.zeros((len(texts), width))
    for at, (used, share) in enumerate(parsed):
        layout[at, : len(used)] = used
        batch[at, : len(share)] = share
    accumulation = np.array(
        [float(str(value)) for value in column(frame, "accumulation_steps", 1).tolist()],
        dtype=float,
    )
    if len(frame) and (not np.all(np.isfinite(accumulation)) or accumulation.min() < 1):
        raise ValueError("accumulation_steps must be at least 1")
    types = [types_of(cluster) for cluster in clusters]
    return SetupArrays.of(
        workloads, types, batch=batch[which], layout=layout[which], accumulation=accumulation
    )


def variants_of(frame: pd.DataFrame) -> list[str]:
    """The name of each row's group."""
    if not len(frame):
        return []
    rows, which = numbered(zip(frame["workload"].astype(str), modes_of(frame), strict=True))
    names = [variant(workload, mode) for workload, mode in rows]
    return [names[at] for at in which.tolist()]


def as_variants(frame: pd.DataFrame) -> pd.DataFrame:
    """Rename the workloads of rows in other known modes to their groups' names."""
    if not len(frame):
        return frame
    other = np.array([mode in MODES[1:] for mode in modes_of(frame)])
    if not other.any():
        return frame
    columns = {
        name: frame[name].where(~other, known[0])
        for name, known in MODE_COLUMNS.items()
        if name in frame
    }
    return frame.assign(workload=np.where(other, variants_of(frame), frame["workload"]), **columns)
