"""When two measurement rows are of one setup, however their texts spell it, and how often a setup was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from .cloud import parse_cluster, parse_numbers
from .workload import Setup

# Workload, (instance type, layout, batch) of each machine in one order, accumulation steps, strategy, precision.
Key = tuple[str, tuple[tuple[str, int, int], ...], int, str, str]


def setup_key(setup: Setup) -> Key:
    """What decides a step time: all of the setup but its market and the order of its machines."""
    types = [offer.instance_type.name for offer in setup.cluster.members]
    return (
        setup.workload,
        tuple(sorted(zip(types, setup.layout, setup.batch_per_device, strict=True))),
        setup.accumulation_steps,
        setup.strategy,
        setup.precision,
    )


def row_key(row: Mapping[str, Any], devices: Mapping[str, int]) -> Key:
    """The same of a measurement row; `devices` of an instance type stand in for a layout that is not given.

    Raises ValueError where cluster, layout or batches cannot be read.
    """
    names = parse_cluster(str(row["cluster"]))
    stated = row.get("layout")
    whole = tuple(devices.get(name, 1) for name in names)
    layout = whole if _absent(stated) else parse_numbers(str(stated), len(names), "layout")
    batches = parse_numbers(str(row["batch_per_device"]), len(names), "batch_per_device")
    steps, strategy, precision = (row.get(name) for name in ("accumulation_steps", "strategy", "precision"))
    return (
        str(row["workload"]),
        tuple(sorted(zip(names, layout, batches, strict=True))),
        1 if _absent(steps) else int(str(steps).split(".")[0]),
        "ddp" if _absent(strategy) else str(strategy),
        "fp32" if _absent(precision) else str(precision),
    )


def runs_of(setups: Sequence[Setup], runs: pd.DataFrame) -> list[int]:
    """How many of `runs` measured each setup, aligned with `setups`."""
    devices = {offer.instance_type.name: offer.instance_type.devices for s in setups for offer in s.cluster.members}
    counted = Counter(row_key(row, devices) for row in rows_of(runs))
    return [counted[setup_key(setup)] for setup in setups]


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The frame's rows as dictionaries with text keys."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _absent(value: object) -> bool:
    return value is None or value == "" or (isinstance(value, float) and value != value) or value is pd.NA
