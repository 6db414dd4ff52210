"""Scores on the harder splits: ours and rivals' on the same rows, by split and by held-out group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from ..arrays import FloatArray
from ..learning import TrainingData
from ..step_time import fit
from .backtest import backtest, described, inside
from .splits import Split

# Known rows, rows asked for, devices by instance type, to seconds.
Rival = Callable[[pd.DataFrame, pd.DataFrame, dict[str, int]], FloatArray]


def ask(
    data: TrainingData, split: Split, rivals: Mapping[str, Rival], devices: dict[str, int], *, seed: int
) -> pd.DataFrame:
    """The rows that `split` asks for, with our prediction and interval and each rival's prediction.

    Columns: split, group, workload, measured_s, ours, low_s, high_s, and one by rival (NaN where it gives none). Where
    the split lets pilots be chosen, our model chooses them, and everybody is told them.
    """
    known, asked = split.known.copy(), split.asked.copy()
    data = replace(data, instance_types=described(data, data.runs))
    if split.choose:
        places = np.flatnonzero(asked)
        candidates = data.runs.iloc[places].drop(columns=["step_s", "sync_s"])
        before = fit(replace(data, runs=data.runs[known]), seed=seed)
        chosen = places[before.choose(candidates, candidates, count=split.choose)]
        known[chosen], asked[chosen] = True, False
    training, rows = data.runs[known], data.runs[asked]
    ours = backtest(replace(data, runs=training), rows, seed=seed)
    hidden = rows.drop(columns=["step_s", "sync_s"])
    return pd.DataFrame(
        {
            "split": split.name,
            "group": split.group,
            "workload": rows["workload"],
            "measured_s": rows["step_s"].astype(float),
            "ours": ours["predicted_step_s"],
            "low_s": ours["low_s"],
            "high_s": ours["high_s"],
            **{name: rival(training, hidden, devices) for name, rival in rivals.items()},
        }
    )


def errors(scored: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """Mean, median and 90th percentile of |predicted / measured - 1| by split and model, in per cent."""
    found = []
    for split, own in scored.groupby("split", sort=False):
        for name in names:
            away = 100 * np.abs(own[name].to_numpy(float) / own["measured_s"].to_numpy(float) - 1)
            told = away[np.isfinite(away)]
            figures = (told.mean(), np.median(told), np.quantile(told, 0.9)) if len(told) else (np.nan,) * 3
            row = {"split": split, "model": name, "rows": len(told)}
            found.append({**row, **dict(zip(("mean", "median", "p90"), figures, strict=True))})
    return pd.DataFrame(found)


def coverage(scored: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Part of the rows inside our 90, 80 and 50 % intervals, and the median width of the first, in per cent."""
    covered = inside(*(scored[name].to_numpy(float) for name in ("measured_s", "low_s", "high_s")))
    told = scored.assign(
        error=100 * np.abs(scored["ours"] / scored["measured_s"] - 1),
        **{f"inside_{part}": 100.0 * found for part, found in covered.items()},
        width=100 * (scored["high_s"] - scored["low_s"]) / scored["ours"],
    )
    figures = {name: (name, "mean") for name in ("inside_90", "inside_80", "inside_50")}
    figures |= {"mean": ("error", "mean"), "median": ("error", "median"), "width": ("width", "median")}
    return told.groupby(by, sort=False).agg(rows=("error", "size"), **figures).reset_index()
