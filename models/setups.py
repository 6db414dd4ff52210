"""Measurement columns read into arrays, one row a setup, one column a group of equal instances. Never predicts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd

from .cloud import cluster_name, parse_cluster, parse_numbers

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
IntArray = np.ndarray[tuple[int, ...], np.dtype[np.intp]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupArrays:
    """Parsed setups in rank order; (rows, members) arrays are zero where padded.

    A member is `count` equal instances of the type `names[kind]` (-1: padded), each with `layout` devices of `batch`
    samples. Measured rows have one instance a member; planned ones, which are many and large, as many as are equal.
    """

    workloads: tuple[str, ...]
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
        places = {name: at for at, name in enumerate(sorted({name for row in types for name in row}))}
        kind = np.full(layout.shape, -1, dtype=np.intp)
        for row, names in enumerate(types):
            kind[row, : len(names)] = [places[name] for name in names]
        return cls(
            workloads=tuple(workloads),
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
        owners = {name: at for at, name in enumerate(dict.fromkeys(self.workloads))}
        owner = np.array([owners[name] for name in self.workloads], dtype=np.intp)[:, None]
        code = np.where(self.kind >= 0, owner * len(self.names) + self.kind, -1)
        workloads = tuple(owners)
        for one in np.flatnonzero(np.bincount(code[code >= 0])).tolist():
            rows, members = np.nonzero(code == one)
            yield workloads[one // len(self.names)], self.names[one % len(self.names)], (rows, members)

    def by_type(self, value: Mapping[str, float], padded: float) -> FloatArray:
        """(rows, members) the value of each member's type, `padded` where there is none."""
        known = np.array([value[name] for name in self.names] + [padded], dtype=float)
        return np.asarray(known[self.kind], dtype=float)

    def take(self, picked: np.ndarray[tuple[int, ...], np.dtype[np.intp]]) -> SetupArrays:
        """The rows at these positions."""
        used = np.flatnonzero((self.kind[picked] >= 0).any(axis=0))
        width = int(used[-1]) + 1 if len(used) else 1
        return SetupArrays(
            workloads=tuple(self.workloads[one] for one in picked.tolist()),
            names=self.names,
            kind=self.kind[picked, :width],
            count=self.count[picked, :width],
            batch=self.batch[picked, :width],
            layout=self.layout[picked, :width],
            accumulation=self.accumulation[picked],
        )


@lru_cache(maxsize=65536)
def _parse(cluster: str, layout: str, batch: str, devices: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Devices used and batch of each instance; `devices` is those of each where the layout is empty."""
    types = _types(cluster)
    used = parse_numbers(layout, len(types), "layout") if layout else devices
    return used, parse_numbers(batch, len(types), "batch_per_device")


@lru_cache(maxsize=65536)
def _types(cluster: str) -> tuple[str, ...]:
    return parse_cluster(cluster)


def _read(cluster: str, layout: str, batch: str, devices: Mapping[str, int]) -> tuple[tuple[int, ...], ...]:
    return _parse(cluster, layout, batch, () if layout else tuple(devices.get(name, 1) for name in _types(cluster)))


def column(frame: pd.DataFrame, name: str, default: object) -> pd.Series[Any]:
    """The column, with `default` where it or a value of it is missing."""
    if name not in frame.columns:
        return pd.Series([default] * len(frame), index=frame.index, dtype=object)
    values = frame[name].astype(object)
    return values.where(values.notna(), default)


def read_setups(frame: pd.DataFrame, devices: dict[str, int]) -> SetupArrays:
    """Parse the measurement columns; `devices` by instance type stands in for an empty layout.

    Raises ValueError on a missing column or on text that is not of the contract's form.
    """
    missing = [name for name in ("workload", "cluster", "batch_per_device") if name not in frame.columns]
    if missing:
        raise ValueError(f"setups lack the column {missing[0]!r}")
    clusters = [str(value) for value in frame["cluster"]]
    layouts = [str(value).strip() for value in column(frame, "layout", "")]
    batches = [str(value) for value in frame["batch_per_device"]]
    parsed = [_read(*texts, devices) for texts in zip(clusters, layouts, batches, strict=True)]
    types = tuple(_types(cluster) for cluster in clusters)
    width = max((len(row) for row in types), default=1)
    layout, batch = np.zeros((len(frame), width)), np.zeros((len(frame), width))
    for row, (used, share) in enumerate(parsed):
        layout[row, : len(used)] = used
        batch[row, : len(share)] = share
    accumulation = np.array([float(str(value)) for value in column(frame, "accumulation_steps", 1)], dtype=float)
    if len(frame) and (not np.all(np.isfinite(accumulation)) or accumulation.min() < 1):
        raise ValueError("accumulation_steps must be at least 1")
    workloads = tuple(str(value) for value in frame["workload"])
    return SetupArrays.of(workloads, types, batch=batch, layout=layout, accumulation=accumulation)


def in_one_order(frame: pd.DataFrame, devices: dict[str, int]) -> dict[str, list[str]]:
    """Columns cluster, layout, batch_per_device with machines sorted by type: `1xb+1xa`, `4+8` to `1xa+1xb`, `8+4`.

    Machines of one type stay in the order given: which of them holds more devices is another placement.

    Raises ValueError on text that is not of the contract's form.
    """
    columns = (column(frame, name, "") for name in ("cluster", "layout", "batch_per_device"))
    texts: dict[str, list[str]] = {"cluster": [], "layout": [], "batch_per_device": []}
    for cluster, layout, batch in zip(*columns, strict=True):
        used, share = _read(str(cluster), str(layout).strip(), str(batch), devices)
        triples = sorted(zip(parse_cluster(str(cluster)), used, share, strict=True), key=itemgetter(0))
        texts["cluster"].append(cluster_name(name for name, _, _ in triples))
        texts["layout"].append("+".join(str(one) for _, one, _ in triples))
        texts["batch_per_device"].append("+".join(str(one) for _, _, one in triples))
    return texts


def require_known(names: Iterable[str], known: Sequence[str], what: str) -> None:
    """Raises ValueError at the first of `names` that is not in `known`, naming the nearest that are."""
    for name in sorted(set(names) - set(known)):
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)[:5]
        raise ValueError(f"unknown {what} {name!r}; the nearest known: {', '.join(near) or 'none'}")
