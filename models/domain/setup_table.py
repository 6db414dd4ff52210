"""Many setups as arrays, read from measurement columns; which rows are of one setup, and how often each was measured.

One row a setup, one column a group of equal instances.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import pandas as pd

from .categorical import numbered
from .cluster import InstanceType, cluster_name, parse_cluster, parse_numbers
from .workload import MODE_COLUMNS, Mode, Setup


@lru_cache(maxsize=65536)
def _parse(
    cluster: str, layout: str, batch: str, devices: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Devices used and batch of each instance; `devices` is those of each where the layout is empty."""
    types = types_of(cluster)
    used = parse_numbers(layout, len(types), "layout") if layout else devices
    return used, parse_numbers(batch, len(types), "batch_per_device")


@lru_cache(maxsize=65536)
def types_of(cluster: str) -> tuple[str, ...]:
    return parse_cluster(cluster)


def machines_of(
    cluster: str, layout: str, batch: str, devices: Mapping[str, int]
) -> tuple[tuple[int, ...], ...]:
    return _parse(
        cluster,
        layout,
        batch,
        () if layout else tuple(devices.get(name, 1) for name in types_of(cluster)),
    )


def column(frame: pd.DataFrame, name: str, default: object) -> pd.Series[Any]:
    """The column, with `default` where it or a value of it is missing."""
    if name not in frame.columns:
        return pd.Series([default] * len(frame), index=frame.index, dtype=object)
    values = frame[name].astype(object)
    return values.where(values.notna(), default)


def mode_of(row: Mapping[str, Any]) -> Mode:
    """The mode of a measurement row; a column or value that is missing has the usual value."""
    given = {name: row.get(name) for name in MODE_COLUMNS}
    return Mode(**{name: str(value) for name, value in given.items() if not _absent(value)})


def modes_of(frame: pd.DataFrame) -> list[Mode]:
    """Each row's mode; a column or value that is missing has the usual value."""
    columns = [column(frame, name, known[0]).tolist() for name, known in MODE_COLUMNS.items()]
    rows, which = numbered(zip(*columns, strict=True))
    modes = [mode_of(dict(zip(MODE_COLUMNS, parts, strict=True))) for parts in rows]
    return [modes[at] for at in which.tolist()]


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
        used, share = machines_of(cluster, layout.strip(), batch, devices)
        triples = sorted(zip(types_of(cluster), used, share, strict=True), key=itemgetter(0))
        texts["cluster"].append(cluster_name(name for name, _, _ in triples))
        texts["layout"].append("+".join(str(one) for _, one, _ in triples))
        texts["batch_per_device"].append("+".join(str(one) for _, _, one in triples))
    return {name: [own[at] for at in which.tolist()] for name, own in texts.items()}


def require_known(names: Iterable[str], known: Sequence[str], what: str) -> None:
    """Raises ValueError at the first of `names` that is not in `known`, naming the nearest that are."""
    for name in sorted(set(names) - set(known)):
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)[:5]
        raise ValueError(f"unknown {what} {name!r}; the nearest known: {', '.join(near) or 'none'}")


# Workload, mode, (instance type, layout, batch) of each machine in one order, accumulation steps.
Key = tuple[str, Mode, tuple[tuple[str, int, int], ...], int]
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
        setup.workload,
        setup.mode,
        tuple(sorted(zip(types, setup.layout, setup.batch_per_device, strict=True))),
        setup.accumulation_steps,
    )


def row_key(row: Mapping[str, Any], devices: Mapping[str, int]) -> Key:
    """The same of a measurement row; `devices` of an instance type stand in for a layout that is not given.

    Raises ValueError where cluster, layout or batches cannot be read.
    """
    cluster, stated = str(row["cluster"]), row.get("layout")
    layout, batches = machines_of(
        cluster, "" if _absent(stated) else str(stated), str(row["batch_per_device"]), devices
    )
    steps = row.get("accumulation_steps")
    return (
        str(row["workload"]),
        mode_of(row),
        tuple(sorted(zip(types_of(cluster), layout, batches, strict=True))),
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
