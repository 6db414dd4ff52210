"""Contests between measured setups of a workload that is held out: what the model would choose, knowing little."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from ..columns import read_setups
from ..learning import TrainingData
from ..setups import SetupArrays
from ..step_time import StepTimeModel, fit
from .backtest import described
from .choice import Contest

# Fewest different setups at one global batch among which a choice is worth judging; joint draws of each.
_FEWEST, _DRAWS = 8, 400


def contests(
    data: TrainingData,
    devices: dict[str, int],
    usd_per_hour: Mapping[str, float],
    *,
    pilots: int,
    seed: int,
    runs: int = 1,
) -> Iterator[tuple[str, float, Contest]]:
    """(workload, global batch, contest): each workload in turn known by its profiles and one-device runs only.

    `pilots` more of its runs are known, chosen by the model's own uncertainty. The others' runs are known in full.
    Setups with an instance type that has no price are left out, and those measured less than `runs` times: what one run
    says is the best is partly luck.
    """
    data = replace(data, instance_types=described(data, data.runs), runs=data.runs.reset_index(drop=True))
    setups = read_setups(data.runs, devices)
    names, alone = np.array(setups.workloads), setups.ranks == 1
    for workload in sorted(set(setups.workloads)):
        own = names == workload
        known = ~own | alone
        try:
            model = fit(replace(data, runs=data.runs[known]), seed=seed)
        except ValueError:  # nothing else tells about the workload
            continue
        if workload not in model.workloads:
            continue
        places = np.flatnonzero(own & ~alone)
        if pilots and len(places):
            asked = _hidden(data.runs.iloc[places])
            known[places[model.choose(asked, asked, count=pilots)]] = True
            model = fit(replace(data, runs=data.runs[known]), seed=seed)
        for batch, at, measured_s in _groups(data.runs, setups, own, usd_per_hour, runs):
            yield workload, batch, _contest(model, data.runs, setups, at, measured_s, devices, usd_per_hour, seed=seed)


def _hidden(runs: pd.DataFrame) -> pd.DataFrame:
    return runs.drop(columns=["step_s", "sync_s", "step_spread"], errors="ignore")


def _groups(
    runs: pd.DataFrame,
    setups: SetupArrays,
    own: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    usd_per_hour: Mapping[str, float],
    least_runs: int,
) -> Iterator[
    tuple[float, np.ndarray[tuple[int, ...], np.dtype[np.intp]], np.ndarray[tuple[int, ...], np.dtype[np.float64]]]
]:
    """Global batch, a row for each different setup at it, and the median of the setup's measured seconds."""
    rows = pd.DataFrame(
        {
            "batch": setups.samples,
            "setup": [
                str((sorted(zip(types, layout, batch, strict=False)), steps))
                for types, layout, batch, steps in zip(
                    setups.types, setups.layout, setups.batch, setups.accumulation, strict=True
                )
            ],
            "step_s": runs["step_s"].to_numpy(float),
            "at": np.arange(len(runs)),
        }
    )
    priced = np.array([all(name in usd_per_hour for name in types) for types in setups.types], dtype=bool)
    for batch, group in rows[own & priced].groupby("batch"):
        different = group.groupby("setup").agg(
            step_s=("step_s", "median"), at=("at", "first"), runs=("step_s", "count")
        )
        different = different[different["runs"] >= least_runs]
        if len(different) >= _FEWEST:
            yield float(str(batch)), different["at"].to_numpy(np.intp), different["step_s"].to_numpy(float)


def _contest(
    model: StepTimeModel,
    runs: pd.DataFrame,
    setups: SetupArrays,
    at: np.ndarray[tuple[int, ...], np.dtype[np.intp]],
    measured_s: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    devices: Mapping[str, int],
    usd_per_hour: Mapping[str, float],
    *,
    seed: int,
) -> Contest:
    asked, taken = _hidden(runs.iloc[at]), setups.take(at)
    predicted = model.predict(asked)
    whole = np.array([sum(devices.get(name, 1) for name in types) for types in taken.types], dtype=float)
    return Contest(
        measured_s=measured_s,
        predicted_s=predicted["step_s"].to_numpy(float),
        draws=model.draws(asked, count=_DRAWS, seed=seed),
        compute_s=predicted["compute_s"].to_numpy(float),
        usd_per_hour=np.array([sum(usd_per_hour[name] for name in types) for types in taken.types], dtype=float),
        machines=taken.instances,
        devices=taken.ranks,
        full=np.asarray(taken.ranks >= whole, dtype=bool),
    )
