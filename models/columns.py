"""Measurement columns, as everybody writes them, read into arrays; and the same columns in one order."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd

from .cloud import cluster_name, parse_cluster, parse_numbers
from .keys import numbered
from .setups import SetupArrays


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
    clusters, batches, workloads = (
        [str(value) for value in frame[name].tolist()] for name in ("cluster", "batch_per_device", "workload")
    )
    layouts = [str(value).strip() for value in column(frame, "layout", "").tolist()]
    texts, which = numbered(zip(clusters, layouts, batches, strict=True))
    parsed = [_read(*each, devices) for each in texts]
    width = max((len(used) for used, _ in parsed), default=1)
    layout, batch = np.zeros((len(texts), width)), np.zeros((len(texts), width))
    for at, (used, share) in enumerate(parsed):
        layout[at, : len(used)] = used
        batch[at, : len(share)] = share
    accumulation = np.array(
        [float(str(value)) for value in column(frame, "accumulation_steps", 1).tolist()], dtype=float
    )
    if len(frame) and (not np.all(np.isfinite(accumulation)) or accumulation.min() < 1):
        raise ValueError("accumulation_steps must be at least 1")
    types = [_types(cluster) for cluster in clusters]
    return SetupArrays.of(workloads, types, batch=batch[which], layout=layout[which], accumulation=accumulation)


def in_one_order(frame: pd.DataFrame, devices: dict[str, int]) -> dict[str, list[str]]:
    """Columns cluster, layout, batch_per_device with machines sorted by type: `1xb+1xa`, `4+8` to `1xa+1xb`, `8+4`.

    Machines of one type stay in the order given: which of them holds more devices is another placement.

    Raises ValueError on text that is not of the contract's form.
    """
    columns = (map(str, column(frame, name, "").tolist()) for name in ("cluster", "layout", "batch_per_device"))
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
