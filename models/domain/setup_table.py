"""Read setups from rows of measurements, and count the measurements of each setup."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import pandas as pd

from .cluster import InstanceType, cluster_name, parse_cluster, parse_numbers
from .suggestions import nearest_names
from .workload import MODE_COLUMNS, Mode, Setup, join_numbers

Numbers = tuple[int, ...]
Row = dict[Any, Any]


types_of = lru_cache(maxsize=65536)(parse_cluster)  # a million rows name only a few clusters


def machines_of(
    cluster: str, layout: Any, batch: Any, devices: Mapping[str, int]
) -> tuple[Numbers, Numbers]:
    """Return (devices used, batch per device): two tuples with a number for each instance.

    cluster: the name of the cluster, such as `2xa+1xb`.
    layout: a text such as `4+4+2`, with the devices used on each instance. An empty text or a
        missing value means all devices.
    batch: a text such as `8+8+4`, with the batch per device of each instance.
    devices: {instance type: number of devices}. A missing type has one device.
    """
    types = types_of(cluster)
    used = tuple(devices.get(name, 1) for name in types)
    if not _absent(layout):
        used = parse_numbers(layout, len(types), "layout")
    return used, parse_numbers(batch, len(types), "batch_per_device")


def column(frame: pd.DataFrame, name: str, default: object) -> pd.Series[Any]:
    """Return the column `name`, with `default` for missing values or for a missing column."""
    values = frame.get(name, pd.Series(index=frame.index)).astype(object)
    return values.where(values.notna(), default)


def mode_of(row: Mapping[str, Any]) -> Mode:
    """Return the mode (precision, strategy, switches) of a row. Missing values get defaults."""
    return Mode(**{name: str(row[name]) for name in MODE_COLUMNS if not _absent(row.get(name))})


def modes_of(frame: pd.DataFrame) -> list[Mode]:
    """Return the mode (precision, strategy, switches) of each row of `frame`."""
    defaults = Mode()._asdict().items()
    columns = (column(frame, name, usual).replace("", usual) for name, usual in defaults)
    return list(map(Mode, *columns))


def in_canonical_order(frame: pd.DataFrame, devices: dict[str, int]) -> pd.DataFrame:
    """Return the columns cluster, layout and batch_per_device, rewritten with sorted machines.

    Machines are sorted by instance type: cluster `1xb+1xa` with layout `4+8` becomes `1xa+1xb` with
    layout `8+4`. Machines of the same type keep their order, because layouts `4+8` and `8+4` are
    different placements.

    devices: {instance type: number of devices}. A row without a layout uses all devices.

    Raises:
        ValueError: if a cluster, layout or batch cannot be parsed.
    """
    names = ["cluster", "layout", "batch_per_device"]
    columns = [map(str, column(frame, name, "").tolist()) for name in names]
    texts = []
    for cluster, layout, batch in zip(*columns, strict=True):
        numbers = machines_of(cluster, layout.strip(), batch, devices)
        machines = sorted(zip(types_of(cluster), *numbers, strict=True), key=itemgetter(0))
        types, used, share = zip(*machines, strict=True)
        texts.append((cluster_name(types), join_numbers(used), join_numbers(share)))
    return pd.DataFrame(texts, frame.index, names)


def require_known(names: Iterable[str], known: Sequence[str], what: str) -> None:
    """Raise ValueError if one of `names` is not in `known`.

    `what` is the kind of name in the error message, for example "workload".
    """
    for name in sorted(set(names) - set(known)):
        raise ValueError(f"unknown {what} {name!r}; {nearest_names(name, known)}")


# Workload, mode, sorted (instance type, used devices, batch per device) of the machines, and
# accumulation steps.
Key = tuple[str, Mode, tuple[tuple[str, int, int], ...], int]


def setup_key(setup: Setup) -> Key:
    """Return a key that is equal for setups that differ only in market, zone or machine order."""
    return row_key(setup.row(), {})


def row_key(row: Mapping[str, Any], devices: Mapping[str, int]) -> Key:
    """Return the key of the setup in a row of measurements, in the form of `setup_key`.

    devices: the number of devices of each instance type; needed if the row has no layout.

    Raises:
        ValueError: if the cluster, layout or batch cannot be parsed.
    """
    cluster, steps = row["cluster"], row.get("accumulation_steps")
    numbers = machines_of(cluster, row.get("layout"), row["batch_per_device"], devices)
    machines = zip(types_of(cluster), *numbers, strict=True)
    count = 1 if _absent(steps) else int(float(str(steps)))
    return row["workload"], mode_of(row), tuple(sorted(machines)), count


def runs_by_key(types: Iterable[InstanceType], runs: pd.DataFrame) -> Counter[Key]:
    """Count the measurements of each setup, as {key of the setup (see `setup_key`): count}.

    types: the instance types of the clusters. A row without a layout uses all their devices.
    runs: a frame of measurements. A row counts as many times as its column `runs` says, or once if
        the frame has no such column.
    """
    devices = {kind.name: kind.devices for kind in types}
    counted: Counter[Key] = Counter()
    for row in rows_of(runs):
        counted[row_key(row, devices)] += row.get("runs", 1)
    return counted


def rows_of(frame: pd.DataFrame) -> list[Row]:
    """Return the rows of the frame as dictionaries."""
    return frame.to_dict("records")


def _absent(value: Any) -> bool:
    return value == "" or bool(pd.isna(value))
