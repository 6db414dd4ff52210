"""What is known of a workload before anything is bought for it: two starts of a replay, and the belief at each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ..arrays import BoolArray, FloatArray
from ..columns import read_setups
from ..learning import TrainingData
from ..step_time import fit
from ..wants import PROFILE_BATCHES, Costs
from .backtest import described
from .replay import Bill, Ground

Places = np.ndarray[tuple[int, ...], np.dtype[np.intp]]

# Rows of each other workload that the model of a replay learns from: all of them take four times as long to fit.
_MOST_OF_OTHERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The belief about log step of a ground's setups; `known` ones are measured already, which cost `usd`."""

    mean: FloatArray
    covariance: FloatArray
    noise: FloatArray
    known: tuple[int, ...]
    usd: float


def one_device(runs: pd.DataFrame, devices: dict[str, int]) -> BoolArray:
    """Mask of the rows of one device."""
    return np.asarray(read_setups(runs, devices).ranks == 1)


def start(
    data: TrainingData,
    ground: Ground,
    devices: dict[str, int],
    *,
    costs: Costs,
    usd: dict[str, float],
    given: bool,
    seed: int,
) -> Start:
    """The model of all other workloads, and of this one's single device.

    Its single-device rows and profiles are `given`; else none of it is known and 4 of those rows on the cheapest
    machine that has them are bought, by one launch. Other workloads are thinned to 300 rows, drawn by `seed`. Raises
    ValueError where the workload has no row of one device to begin with.
    """
    runs = data.runs.reset_index(drop=True)
    mine = (runs["workload"] == ground.workload).to_numpy()
    alone: Places = np.flatnonzero(mine & one_device(runs, devices))
    bill = Bill(costs=costs)
    if not given:
        alone = _profile(runs, alone, usd)
        for at in alone:
            kind = str(runs["cluster"].iloc[at])[2:]
            bill.add(kind, float(runs["step_s"].iloc[at]), usd[kind])
    random = np.random.default_rng(seed)
    kept = [alone]
    for name in sorted(set(runs["workload"].astype(str)) - {ground.workload}):
        own = np.flatnonzero((runs["workload"] == name).to_numpy())
        kept.append(random.choice(own, min(len(own), _MOST_OF_OTHERS), replace=False))
    learned = _without(data, ground.workload) if not given else data
    learned = replace(learned, runs=runs.iloc[np.sort(np.concatenate(kept))])
    model = fit(replace(learned, instance_types=described(learned, ground.rows)), seed=seed)
    mean, covariance, noise = model.joint(ground.rows)
    known = np.flatnonzero(one_device(ground.rows, devices)) if given else np.zeros(0, dtype=int)
    return Start(mean=mean, covariance=covariance, noise=noise, known=tuple(map(int, known)), usd=bill.usd)


def _profile(runs: pd.DataFrame, alone: Places, usd: dict[str, float]) -> Places:
    """A few batches over the range of one machine's single-device rows, its smallest and largest among them."""
    if not len(alone):
        raise ValueError("no row of one device to begin with")
    own = runs.iloc[alone]
    cheapest = min(sorted(set(own["cluster"].astype(str))), key=lambda name: usd[name[2:]])
    own = own[own["cluster"] == cheapest]
    order = own["batch_per_device"].astype(float).sort_values(kind="stable").index.to_numpy()
    return np.unique(order[np.linspace(0, len(order) - 1, PROFILE_BATCHES).round().astype(int)])


def _without(data: TrainingData, workload: str) -> TrainingData:
    """The same data without the profiles of a workload."""

    def others(frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["workload"] != workload] if "workload" in frame else frame

    return replace(data, profiles=others(data.profiles), buckets=others(data.buckets))
