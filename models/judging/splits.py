"""The harder questions to ask of measured rows: which are known, which are to be predicted. Seeded; no model is fitted.

Each split gives masks over the rows. Groups are whole workloads, sizes or layouts: rows are drawn by chance only where
the question itself says so (between neighbours; so many random measurements).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..arrays import BoolArray, FloatArray
from ..columns import read_setups
from ..setups import SetupArrays

NEIGHBOURS, ALONE, PILOTS, CHOSEN, RANDOM, LARGER, UNEQUAL = (
    "neighbours",
    "one device known",
    "three pilots",
    "three chosen pilots",
    "twelve measurements",
    "larger clusters",
    "unequal layouts",
)
_NEIGHBOUR_SEEDS, _RANDOM_SEEDS, _MEASUREMENTS, _TEST_PART = 3, 5, 12, 0.2
# Sizes of the devices known and asked for in the split by cluster size.
_SIZES = ((4, 16), (8, 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """`known` and `asked` are masks over the rows; `choose` more may be measured first, of those asked for."""

    name: str
    group: str
    known: BoolArray
    asked: BoolArray
    choose: int = 0


def splits(runs: pd.DataFrame, devices: dict[str, int], *, seed: int) -> Iterator[Split]:
    """Every split of the benchmark; `devices` by instance type stands in for an empty layout."""
    setups = read_setups(runs, devices)
    workload = np.array(setups.workloads)
    alone = setups.ranks == 1
    for one in range(_NEIGHBOUR_SEEDS):
        asked = np.random.default_rng([seed, one]).random(len(runs)) < _TEST_PART
        yield Split(name=NEIGHBOURS, group=f"draw {one}", known=~asked, asked=asked)
    for name in sorted(set(setups.workloads)):
        own = workload == name
        yield Split(name=ALONE, group=name, known=~own | alone, asked=own & ~alone)
        for batch, picked in _pilots(setups, own, devices):
            yield Split(
                name=PILOTS, group=f"{name} at {batch:g}", known=~own | alone | picked, asked=own & ~alone & ~picked
            )
        yield Split(name=CHOSEN, group=name, known=~own | alone, asked=own & ~alone, choose=3)
        for one in range(_RANDOM_SEEDS):
            picked = np.zeros(len(runs), dtype=bool)
            random = np.random.default_rng([seed, 100 + one])
            picked[random.choice(np.flatnonzero(own), min(_MEASUREMENTS, int(own.sum())), replace=False)] = True
            yield Split(name=RANDOM, group=f"{name} draw {one}", known=~own | picked, asked=own & ~picked)
    for most, size in _SIZES:
        yield Split(
            name=LARGER, group=f"{most} to {size} devices", known=setups.ranks <= most, asked=setups.ranks == size
        )
    unequal = np.array([len(set(row[row > 0])) > 1 for row in setups.layout])
    yield Split(name=UNEQUAL, group="all", known=~unequal, asked=unequal)


def _pilots(setups: SetupArrays, own: BoolArray, devices: dict[str, int]) -> Iterator[tuple[float, BoolArray]]:
    """One full machine, one device on each of two, two full machines: at each quartile of the batches that have all."""
    full = np.array([max(devices.get(name, 1) for name in types) for types in setups.types], dtype=float)
    machines = setups.instances
    even = setups.layout.max(axis=1) * machines == setups.ranks
    kinds = [
        own & even & (machines == count) & (setups.ranks == count * each)
        for count, each in ((1, full), (2, np.ones_like(full)), (2, full))
    ]
    batch: FloatArray = setups.batch[:, 0]
    shared = sorted(set(batch[kinds[0]]) & set(batch[kinds[1]]) & set(batch[kinds[2]]))
    for at in sorted({round(part * (len(shared) - 1)) for part in (0.25, 0.5, 0.75)} if shared else ()):
        yield shared[at], (kinds[0] | kinds[1] | kinds[2]) & (batch == shared[at])
