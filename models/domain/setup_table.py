"""Many setups as arrays, read from measurement columns; which rows are of one setup, and how often each was measured.

One row a setup, one column a group of equal instances.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd

from .categorical import Keys, numbered
from .cluster import InstanceType, cluster_name, parse_cluster, parse_numbers
from .numeric import BoolArray, FloatArray, IntArray
from .workload import MODE_COLUMNS, MODES, Mode, Setup, variant


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
        """(rows, members) each of the values of a workload with an instance type, `padded` where there is none."""
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


@lru_cache(maxsize=65536)
def _parse(
    cluster: str, layout: str, batch: str, devices: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Devices used and batch of each instance; `devices` is those of each where the layout is empty."""
    types = _types(cluster)
    used = parse_numbers(layout, len(types), "layout") if layout else devices
    return used, parse_numbers(batch, len(types), "batch_per_device")


@lru_cache(maxsize=65536)
def _types(cluster: str) -> tuple[str, ...]:
    return parse_cluster(cluster)


def _read(
    cluster: str, layout: str, batch: str, devices: Mapping[str, int]
) -> tuple[tuple[int, ...], ...]:
    return _parse(
        cluster,
        layout,
        batch,
        () if layout else tuple(devices.get(name, 1) for name in _types(cluster)),
    )


def column(frame: pd.DataFrame, name: str, default: object) -> pd.Series[Any]:
    """The column, with `default` where it or a value of it is missing."""
    if name not in frame.columns:
        return pd.Series([default] * len(frame), index=frame.index, dtype=object)
    values = frame[name].astype(object)
    return values.where(values.notna(), default)


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
    parsed = [_read(*each, devices) for each in texts]
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
    types = [_types(cluster) for cluster in clusters]
    return SetupArrays.of(
        workloads, types, batch=batch[which], layout=layout[which], accumulation=accumulation
    )


def variants_of(frame: pd.DataFrame) -> list[str]:
    """What a model knows each row's workload as, by the column workload and, where there, those of its mode."""
    if not len(frame):
        return []
    modes = [column(frame, name, known[0]).tolist() for name, known in MODE_COLUMNS.items()]
    rows, which = numbered(zip(frame["workload"].tolist(), *modes, strict=True))
    names = [variant(str(workload), _mode(*parts)) for workload, *parts in rows]
    return [names[at] for at in which.tolist()]


def _mode(*parts: object) -> Mode:
    """That of a row's values in the order of MODE_COLUMNS, empty or missing ones as they are usual."""
    usual = zip(parts, Mode(), strict=True)
    return Mode(*(one if _absent(part) else str(part) or one for part, one in usual))


def as_variants(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows in another known mode as rows of the workload's variant in plain fp32; the others as they are."""
    plain = {name: known[0] for name, known in MODE_COLUMNS.items()}
    given = {name: column(frame, name, usual) for name, usual in plain.items() if name in frame}
    if not len(frame) or not any((given[name] != plain[name]).any() for name in given):
        return frame
    modes = [
        _mode(*pair)
        for pair in zip(
            *(given.get(name, [plain[name]] * len(frame)) for name in plain), strict=True
        )
    ]
    other = np.array([mode in MODES[1:] for mode in modes])
    columns = {name: values.where(~other, plain[name]) for name, values in given.items()}
    return frame.assign(workload=np.where(other, variants_of(frame), frame["workload"]), **columns)


def in_one_order(frame: pd.DataFrame, devices: dict[str, int]) -> dict[str, list[str]]:
    """Columns cluster, layout, batch_per_device with machines sorted by type: `1xb+1xa`, `4+8` to `1xa+1xb`, `8+4`.

    Machines of one type stay in the order given: which of them holds more devices is another placement.

    Raises ValueError on text that is not of the contract's form.
    """
    columns = (
        map(str, column(frame, name, "").tolist())
        for name in ("cluster", "layout", "batch_per_device")
    )
    rows, which = numbered(zip(*columns, strict=True))
    texts: dict[str, list[str]] = {"cluster": [], "layout": [], "batch_per_device": []}
    for cluster, layout, batch in rows:
        used, share = _read(cluster, layout.strip(), batch, devices)
        triples = sorted(zip(_types(cluster), used, share, strict=True), key=itemgetter(0))
        texts["cluster"].append(cluster_name(name for name, _, _ in triples))
        texts["layout"].append("+".join(str(one) for _, one, _ in triples))
        texts["batch_per_device"].append("+".join(str(one) for _, _, one in triples))
    return {name: [own[at] for at in which.tolist()] for name, own in texts.items()}


def require_known(names: Iterable[str], known: Sequence[str], what: str) -> None:
    """Raises ValueError at the first of `names` that is not in `known`, naming the nearest that are."""
    for name in sorted(set(names) - set(known)):
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)[:5]
        raise ValueError(f"unknown {what} {name!r}; the nearest known: {', '.join(near) or 'none'}")


# Workload in its mode, (instance type, layout, batch) of each machine in one order, accumulation steps.
Key = tuple[str, tuple[tuple[str, int, int], ...], int]
# Columns of a measurement row that `row_key` reads.
_KEY_COLUMNS = (
    "workload",
    "cluster",
    "layout",
    "batch_per_device",
    "accumulation_steps",
    *MODE_COLUMNS,
)


def setup_key(setup: Setup) -> Key:
    """What decides a step time: all of the setup but its market and the order of its machines."""
    types = [offer.instance_type.name for offer in setup.cluster.members]
    return (
        variant(setup.workload, setup.mode),
        tuple(sorted(zip(types, setup.layout, setup.batch_per_device, strict=True))),
        setup.accumulation_steps,
    )


def row_key(row: Mapping[str, Any], devices: Mapping[str, int]) -> Key:
    """The same of a measurement row; `devices` of an instance type stand in for a layout that is not given.

    Raises ValueError where cluster, layout or batches cannot be read.
    """
    cluster, stated = str(row["cluster"]), row.get("layout")
    layout, batches = _read(
        cluster, "" if _absent(stated) else str(stated), str(row["batch_per_device"]), devices
    )
    steps = row.get("accumulation_steps")
    return (
        variant(str(row["workload"]), _mode(*(row.get(name) for name in MODE_COLUMNS))),
        tuple(sorted(zip(_types(cluster), layout, batches, strict=True))),
        1 if _absent(steps) else int(str(steps).split(".")[0]),
    )


def runs_of(setups: Sequence[Setup], runs: pd.DataFrame) -> list[int]:
    """How many of `runs` measured each setup, aligned with `setups`; as `runs_by_key` counts them."""
    types = (offer.instance_type for setup in setups for offer in setup.cluster.members)
    counted = runs_by_key({setup.workload for setup in setups}, types, runs)
    return [counted[setup_key(setup)] for setup in setups]


def runs_by_key(
    workloads: set[str], types: Iterable[InstanceType], runs: pd.DataFrame
) -> Counter[Key]:
    """How many of `runs` measured each key of setups of these workloads on these types, among others.

    A row of `runs` stands for as many as its column `runs` says, where there is one, and else for one.
    """
    devices = {one.name: one.devices for one in types}
    counted: Counter[Key] = Counter()
    for row in rows_of(_distinct(runs, workloads)):
        counted[row_key(row, devices)] += row["runs"]
    return counted


def _distinct(runs: pd.DataFrame, workloads: set[str]) -> pd.DataFrame:
    """Rows of these workloads, each spelling of a setup once, and how many `runs` it has: texts take long to read."""
    if "runs" in runs or not len(runs):
        return runs
    mine = runs[runs["workload"].isin(workloads)]
    columns = [name for name in _KEY_COLUMNS if name in mine]
    return mine.groupby(columns, dropna=False, sort=False).size().rename("runs").reset_index()


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The frame's rows as dictionaries with text keys."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _absent(value: object) -> bool:
    return (
        value is None
        or value == ""
        or (isinstance(value, float) and value != value)
        or value is pd.NA
    )
