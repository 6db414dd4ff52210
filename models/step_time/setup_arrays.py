"""Represent setups as arrays, the input of the step-time model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ..domain.categorical import distinct_rows
from ..domain.numeric import BoolArray, FloatArray, IntArray
from ..domain.setup_table import column, machines_of, modes_of, types_of
from ..domain.workload import Mode


@dataclass(frozen=True, kw_only=True)
class SetupArrays:
    """Setups as arrays: a row for each setup, and a column for each member of its cluster.

    A member is one machine, or several equal machines. Equal machines have the same instance type,
    batch and layout. Rows with fewer members than others are padded with kind -1 and zeros.

    workload, mode: (rows,) positions in `workloads` and `modes`.
    names: instance types.
    kind: (rows, members) position of the instance type in `names`.
    count: (rows, members) number of machines.
    batch: (rows, members) samples of a device in a micro-step.
    layout: (rows, members) number of devices that each machine uses.
    accumulation: (rows,) number of micro-steps in an optimizer step.
    """

    workloads: tuple[str, ...]
    workload: IntArray
    modes: tuple[Mode, ...]
    mode: IntArray
    names: tuple[str, ...]
    kind: IntArray
    count: FloatArray
    batch: FloatArray
    layout: FloatArray
    accumulation: FloatArray

    def dense(self) -> SetupArrays:
        """Return the setups with each mode replaced by its baseline (`Mode.dense`).

        For example, `ddp` replaces `ddp-fp16`.
        """
        return replace(self, modes=tuple(mode.dense for mode in self.modes))

    def groups(self) -> list[tuple[str, Mode, IntArray]]:
        """Return (workload, mode, positions of the rows) for each workload and mode that occur."""
        width = len(self.modes)
        pair = self.workload * width + self.mode
        return [
            (self.workloads[code // width], self.modes[code % width], np.flatnonzero(pair == code))
            for code in np.unique(pair).tolist()
        ]

    @property
    def type_names(self) -> set[str]:
        """Return the instance types that occur in a setup."""
        return {self.names[at] for at in np.unique(self.kind[self.present]).tolist()}

    @property
    def present(self) -> BoolArray:
        """Return a (rows, members) mask: True for members, False for padding."""
        return self.layout > 0

    @property
    def ranks(self) -> FloatArray:
        """Return a (rows,) array: the number of devices that each setup uses."""
        ranks: FloatArray = (self.count * self.layout).sum(axis=1)
        return ranks

    @property
    def instances(self) -> FloatArray:
        """Return a (rows,) array: the number of instances of each setup."""
        instances: FloatArray = self.count.sum(axis=1)
        return instances

    @property
    def samples(self) -> FloatArray:
        """Return a (rows,) array: the global batch, which is the samples of one optimizer step."""
        micro: FloatArray = (self.count * self.layout * self.batch).sum(axis=1)
        return micro * self.accumulation

    def by_type(self, values: ArrayLike, padded: float) -> FloatArray:
        """Look up a value for the instance type of each member, as a (rows, members) array.

        values: the value of each instance type in `names`.
        padded: the value for padding.
        """
        return np.append(values, padded)[self.kind]

    def chunks(self, size: int) -> Iterator[SetupArrays]:
        """Yield the setups in chunks of at most `size` rows.

        If there are no setups, a single empty chunk is yielded.
        """
        count = len(self.workload)
        for picked in np.array_split(np.arange(count), count // size + 1):
            yield self.take(picked)

    def take(self, picked: IntArray) -> SetupArrays:
        """Return the setups at the positions `picked`."""
        arrays = ("workload", "mode", "kind", "count", "batch", "layout", "accumulation")
        return replace(self, **{name: getattr(self, name)[picked] for name in arrays})


def read_setups(frame: pd.DataFrame, devices: dict[str, int]) -> SetupArrays:
    """Parse the columns of measurements in `frame` into setups, one for each row.

    The columns `layout` and `batch_per_device` have a number for each machine, such as `4+4+2`, or
    a single number for all machines. An empty layout means that all devices are used.

    devices: {instance type: number of devices}.

    Raises:
        ValueError: if a required column is missing or a value cannot be parsed.
    """
    for name in ("workload", "cluster", "batch_per_device"):
        if name not in frame:
            raise ValueError(f"the table of setups has no column {name!r}")
    layouts = [str(value).strip() for value in column(frame, "layout", "")]
    written, batches = map(str, frame["cluster"]), map(str, frame["batch_per_device"])
    texts, which = distinct_rows(zip(written, layouts, batches, strict=True))
    clusters = [
        Counter(zip(types_of(text[0]), *machines_of(*text, devices), strict=True)) for text in texts
    ]
    names = sorted({name for members in clusters for name, _, _ in members})
    shape = len(texts), max(map(len, clusters), default=1)
    kind, (layout, batch, count) = np.full(shape, -1), np.zeros((3, *shape))
    for at, members in enumerate(clusters):
        for place, ((name, used, share), machines) in enumerate(members.items()):
            kind[at, place] = names.index(name)
            layout[at, place], batch[at, place], count[at, place] = used, share, machines
    accumulation = column(frame, "accumulation_steps", 1).astype(str).to_numpy().astype(float)
    is_whole = np.isfinite(accumulation) & (accumulation == np.floor(accumulation))
    if not np.all(is_whole & (accumulation >= 1)):
        raise ValueError("accumulation_steps must be a whole number of at least 1 in every row")
    workloads, workload = distinct_rows(frame["workload"].astype(str))
    modes, mode = distinct_rows(modes_of(frame))
    return SetupArrays(
        workloads=workloads,
        workload=workload,
        modes=modes,
        mode=mode,
        names=tuple(names),
        kind=kind[which],
        count=count[which],
        batch=batch[which],
        layout=layout[which],
        accumulation=accumulation,
    )
