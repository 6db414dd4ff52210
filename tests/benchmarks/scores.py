"""Predictions of held-out rows against what was measured: errors, coverage, summaries."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pandas as pd

from models.domain.numeric import BoolArray
from models.domain.workload import MODES
from models.step_time.dataset import TrainingData, workload_facts
from models.step_time.model import StepTimeModel, fit, introduce_all

MEASURED = ["step_s", "sync_s"]  # columns that a prediction may not see
_CANDIDATES, _TARGETS = 400, 250  # rows that pilots are chosen among, and rows they inform about


@dataclass(frozen=True, kw_only=True)
class Group:
    """Masks over the rows: `known` for the fit, `held_out` for predictions.

    The model chooses `choose` pilots among those rows. Groups of one table and name are draws.
    """

    table: str
    name: str
    known: BoolArray
    held_out: BoolArray
    draw: int = 0
    choose: int = 0


def score(data: TrainingData, group: Group, *, seed: int = 0) -> pd.DataFrame:
    """Return the held-out rows: table, group, draw, measured_s, ours, low_s, high_s."""
    known, held_out = group.known, group.held_out
    model = _fitted(data, known, seed)
    if group.choose:
        chosen = _informative(model, data.runs, held_out, group.choose)
        known, held_out = known | chosen, held_out & ~chosen
        model = _fitted(data, known, seed)
    rows = data.runs[held_out]
    found = model.predict(rows.drop(columns=MEASURED, errors="ignore"))
    columns = {"step_s": "ours", "step_low_s": "low_s", "step_high_s": "high_s"}
    return (
        found[list(columns)]
        .rename(columns=columns)
        .assign(measured_s=rows["step_s"], table=group.table, group=group.name, draw=group.draw)
    )


def _fitted(data: TrainingData, known: BoolArray, seed: int) -> StepTimeModel:
    """Fit to the known rows; every workload is predicted in every mode."""
    facts = workload_facts(data)
    model = introduce_all(fit(replace(data, runs=data.runs[known]), seed=seed), facts)
    return replace(model, trained=model.trained | set(product(data.runs["workload"], MODES)))


def _informative(
    model: StepTimeModel, runs: pd.DataFrame, held_out: BoolArray, count: int
) -> BoolArray:
    """Choose greedily the rows that together take most variance off the others."""
    places = np.random.default_rng(0).permutation(np.flatnonzero(held_out))[:_CANDIDATES]
    places = np.sort(places)
    rows = runs.iloc[places].drop(columns=MEASURED, errors="ignore")
    _, covariance, noise = model.joint(rows)
    chosen: list[int] = []
    for _ in range(count):
        gain = (covariance[:_TARGETS] ** 2).sum(axis=0) / (np.diag(covariance) + noise)
        gain[chosen] = -1
        best = int(gain.argmax())
        chosen.append(best)
        column = covariance[:, best].copy()
        covariance = covariance - np.outer(column, column) / (column[best] + noise[best])
    mask = np.zeros(len(runs), dtype=bool)
    mask[places[chosen]] = True
    return mask


def figures(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Mean, median and 90th percentile of the error, coverage and median width of the intervals.

    In per cent: of each draw, then the mean over draws.
    """
    measured = rows["measured_s"].to_numpy(float)
    errors = rows.assign(
        error=100 * abs(rows["ours"] / measured - 1),
        inside=100.0 * ((rows["low_s"] <= measured) & (measured <= rows["high_s"])),
        width=100 * (rows["high_s"] - rows["low_s"]) / rows["ours"],
    )
    each = errors.groupby([*by, "draw"], sort=False).agg(
        mean=("error", "mean"),
        median=("error", "median"),
        p90=("error", lambda error: error.quantile(0.9)),
        covers=("inside", "mean"),
        width=("width", "median"),
    )
    return each.groupby(by, sort=False).mean()


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """By table: the mean of its groups, and the coverage of the worst."""
    each = figures(rows, ["table", "group"])
    by = each.groupby("table", sort=False)
    return by.mean().assign(worst=by["covers"].min())
