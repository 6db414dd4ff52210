"""Represent setups as arrays, and name the model's groups.

A group is a workload in one mode. Group names are only used inside this package; callers give a
workload and a mode.
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
    """Return the name of the group of a workload in a mode.

    The name of the default mode's group (fp32, DDP, no switches) is the workload's name.
    """
    return workload if mode == MODES[0] else f"{workload}{_IN}{mode}"


def workload_and_mode(name: str) -> tuple[str, Mode]:
    """Return the workload and the mode of the group called `name`."""
    workload, found, mode = name.rpartition(_IN)
    return (workload, _OTHERS[mode]) if found and mode in _OTHERS else (name, MODES[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupArrays:
    """Setups as arrays: a row per setup, and a column per member of its cluster, in rank order.

    A member is `count` equal instances of the type `names[kind]`. Each instance uses `layout`
    devices, and each device has `batch` samples in a micro-step. Members of measured setups are
    single instances; members of planned setups may be several. Rows with fewer members than columns
    are padded with kind -1 and zeros. `accumulation` (rows,) is the number of micro-steps in an
    optimizer step.
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
        """Return setups in which each member is one instance.

        `workloads` are the group names of the setups. `types[i]` are the instance types of setup i
        in rank order. The arrays have the shapes of the fields with the same names.
        """
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
        """Return setups of one workload.

        `mode` (rows,) has the position of each setup's mode in `modes`. `columns` are the values of
        all remaining fields of the class.
        """
        groups = Keys.of([variant(workload, one) for one in modes])
        return cls(workloads=groups.take(mode), **columns)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Return the mode of each of `workloads.names`."""
        return tuple(workload_and_mode(name)[1] for name in self.workloads.names)

    def dense(self) -> SetupArrays:
        """Return the same setups, each in the mode with which its mode is compared (Mode.dense)."""
        pairs = (workload_and_mode(name) for name in self.workloads.names)
        table = Keys.of([variant(workload, mode.dense) for workload, mode in pairs])
        return replace(self, workloads=table.take(self.workloads.codes))

    @property
    def types(self) -> tuple[tuple[str, ...], ...]:
        """Return the instance types of each row's members, in rank order."""
        return tuple(
            tuple(self.names[one] for one in row if one >= 0) for row in self.kind.tolist()
        )

    @property
    def met_types(self) -> set[str]:
        """Return the instance types that occur in any row."""
        return {self.names[at] for at in np.unique(self.kind[self.kind >= 0]).tolist()}

    @property
    def present(self) -> BoolArray:
        """Return a (rows, members) mask: True for members, False for padding."""
        return self.layout > 0

    @property
    def ranks(self) -> FloatArray:
        """Return a (rows,) array: the number of devices that each setup uses."""
        return np.asarray((self.count * self.layout).sum(axis=1), dtype=float)

    @property
    def instances(self) -> FloatArray:
        """Return a (rows,) array: the number of instances of each setup."""
        return np.asarray(self.count.sum(axis=1), dtype=float)

    @property
    def samples(self) -> FloatArray:
        """Return a (rows,) array: the samples of one optimizer step."""
        return np.asarray(
            (self.count * self.layout * self.batch).sum(axis=1) * self.accumulation, dtype=float
        )

    def pairs(self) -> Iterator[tuple[str, str, tuple[IntArray, IntArray]]]:
        """Yield (group, instance type, indices) for each pair that occurs.

        The indices are two arrays, the rows and the members in which the pair occurs.
        """
        code = self._pair
        for one, workload, name in self._met(code):
            rows, members = np.nonzero(code == one)
            yield workload, name, (rows, members)

    def by_pair(
        self, value: Callable[[str, str], Sequence[float]], padded: Sequence[float]
    ) -> tuple[FloatArray, ...]:
        """Return (rows, members) arrays of values that depend on group and instance type.

        `value(group, type)` returns one number for each array. `padded` has the number of each
        array for padding.
        """
        code = self._pair
        table = np.tile(
            np.array(padded, dtype=float)[:, None], len(self.workloads.names) * len(self.names) + 1
        )
        for one, workload, name in self._met(code):
            table[:, one] = value(workload, name)
        return tuple(own[code] for own in table)

    def by_type(self, value: Mapping[str, float], padded: float) -> FloatArray:
        """Return a (rows, members) array of the `value` of each member's instance type.

        Padding members get `padded`.
        """
        known = np.array([value[name] for name in self.names] + [padded], dtype=float)
        return np.asarray(known[self.kind], dtype=float)

    def take(self, picked: np.ndarray[tuple[int, ...], np.dtype[np.intp]]) -> SetupArrays:
        """Return the setups at the positions `picked`."""
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
        """Return a (rows, members) array of numbers that identify pairs of group and type.

        Padding has the largest number.
        """
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
    """Parse the measurement columns of `frame` into setups, one per row.

    `devices` has the number of devices of each instance type. It is used for rows whose layout is
    empty, which means all devices.

    Raises:
        ValueError: if a required column is missing or a text cannot be parsed.
    """
    missing = [
        name for name in ("workload", "cluster", "batch_per_device") if name not in frame.columns
    ]
    if missing:
        raise ValueError(f"the setups have no column {missing[0]!r}")
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
    """Return the name of the group (workload in one mode) of each row of `frame`."""
    if not len(frame):
        return []
    rows, which = numbered(zip(frame["workload"].astype(str), modes_of(frame), strict=True))
    names = [variant(workload, mode) for workload, mode in rows]
    return [names[at] for at in which.tolist()]


def as_variants(frame: pd.DataFrame) -> pd.DataFrame:
    """Rename the workloads in `frame` to their groups, and set the mode columns to the defaults.

    Rows in unknown modes stay unchanged.
    """
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
