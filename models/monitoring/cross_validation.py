"""Errors and coverage on setups that the model has not seen.

Splits leave whole groups out and fit again: a workload's multi-machine rows, a number of
instances, a workload on a cluster. Errors are |predicted - measured| / measured; coverage is of
the 90 % interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import ndtri

from ..domain.cluster import cluster_name
from ..domain.numeric import Z_90, IntArray
from ..domain.setup_table import column, types_of
from ..step_time.dataset import TrainingData, definition_digests, valid_runs
from ..step_time.model import StepTimeModel, fit
from ..step_time.setup_arrays import variant, variants_of

SPLITS = ("workload", "cluster_size", "setup")
STEP = ["step_s", "step_low_s", "step_high_s"]
COLUMNS = (
    *("split", "group", "rows", "mean_error", "median_error", "p90_error"),
    *("coverage_90", "median_width"),
)
_SCORED = [*STEP, "split", "group", "row", "run_id", "setup", "measured_s"]
_FOLDS = 5  # of the split by setup

HeldOut = tuple[str, str, TrainingData, pd.DataFrame]
# A `map` whose results come in order, wherever it runs.
Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


def held_out(data: TrainingData, *, seed: int) -> Iterator[HeldOut]:
    """Yield (split, group, training data without the group, the group's rows)."""
    runs = valid_runs(data.runs).reset_index(drop=True)
    size = _machines(runs)
    setup, names = pd.factorize(np.array(_setups(runs), dtype=object), sort=True)
    fold = np.random.default_rng(seed).permutation(len(names))[setup] % _FOLDS
    for split, keys in zip(SPLITS, (np.array(variants_of(runs)), size, fold), strict=True):
        for group in sorted(set(keys.tolist())):
            out = keys == group
            probes = data.probes
            if split == "workload":
                out &= size > 1
            if split == "cluster_size" and group > 1 and len(probes):
                probes = probes[_machines(probes) != group]
            training = replace(data, runs=runs[~out], probes=probes)
            yield split, f"fold {group}" if split == "setup" else str(group), training, runs[out]


def _machines(rows: pd.DataFrame) -> IntArray:
    return np.array([len(types_of(str(name))) for name in rows["cluster"]], dtype=int)


def _setups(rows: pd.DataFrame) -> list[str]:
    """Return each row's workload on its sorted cluster."""
    clusters = [cluster_name(sorted(types_of(str(name)))) for name in rows["cluster"]]
    return [f"{label} on {name}" for label, name in zip(variants_of(rows), clusters, strict=True)]


def fitted(
    data: TrainingData, *, seed: int, each: Each = map
) -> tuple[StepTimeModel, pd.DataFrame]:
    """Return the model of all data, and held-out rows with predictions of models without them.

    Columns: split, group, row (place among the valid runs), run_id, setup (workload on sorted
    cluster), measured_s, step_s, step_low_s, step_high_s. Groups that nothing else informs are left
    out. Raises as `fit`.
    """
    model = fit(data, seed=seed)
    scored = each(partial(_held_out_scores, seed=seed, calibrated=model), held_out(data, seed=seed))
    return model, pd.concat([pd.DataFrame(columns=_SCORED), *scored], ignore_index=True)


def _held_out_scores(work: HeldOut, *, seed: int, calibrated: StepTimeModel) -> pd.DataFrame | None:
    split, group, training, rows = work
    try:
        model = fit(training, seed=seed, calibrated=calibrated)
        return _scored(rows, model).assign(split=split, group=group)
    except ValueError:
        return None


def _scored(rows: pd.DataFrame, model: StepTimeModel) -> pd.DataFrame:
    predicted = model.predict(rows.drop(columns=["step_s", "sync_s"], errors="ignore"))[STEP]
    return predicted.assign(
        row=rows.index,
        run_id=column(rows, "run_id", "").astype(str),
        setup=_setups(rows),
        measured_s=rows["step_s"].astype(float),
    )


def summarise(scored: pd.DataFrame) -> pd.DataFrame:
    """Return the scoreboard (COLUMNS) by group, with a group "all" that pools each split.

    `median_width` is (high - low) / predicted.
    """
    rows = [
        {"split": split, "group": name, **scores(group)}
        for split, of_split in scored.groupby("split", sort=False)
        for name, group in [*of_split.groupby("group"), ("all", of_split)]
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def scores(rows: pd.DataFrame) -> dict[str, float | int]:
    """Return rows, errors, coverage by interval and median width of held-out rows.

    Intervals of 50 and 80 % follow from that of 90 %: the distribution is log-normal.
    """
    measured, step, low, high = (rows[name].to_numpy(float) for name in ("measured_s", *STEP))
    error = np.abs(step / measured - 1)
    with np.errstate(divide="ignore", invalid="ignore"):  # an end at 0 has no narrower intervals
        middle, sd = np.log(low * high) / 2, np.log(high / low) / (2 * Z_90)
        deviations = np.abs(np.log(measured) - middle) / sd
    return {
        "rows": len(rows),
        "mean_error": float(error.mean()),
        "median_error": float(np.median(error)),
        "p90_error": float(np.quantile(error, 0.9)),
        "coverage_50": float((deviations <= ndtri(0.75)).mean()),
        "coverage_80": float((deviations <= ndtri(0.9)).mean()),
        "coverage_90": float(((low <= measured) & (measured <= high)).mean()),
        "median_width": float(np.median((high - low) / step)),
    }


def predictions_of(model: StepTimeModel, data: TrainingData) -> pd.DataFrame:
    """Return predictions of runs whose workload and types `model` has met as they are now.

    Columns as in `fitted`, without split and group. Rows that it was trained on flatter it.
    """
    known = known_of(model, data)
    runs = valid_runs(data.runs).reset_index(drop=True)
    predictable = [
        f"workload {name}" in known and all(f"instance type {one}" in known for one in types)
        for name, types in zip(variants_of(runs), runs["cluster"].map(types_of), strict=True)
    ]
    rows = runs[np.array(predictable, dtype=bool)]
    return _scored(rows, model) if len(rows) else pd.DataFrame(columns=_SCORED)


def known_of(model: StepTimeModel, data: TrainingData) -> set[str]:
    """Return "workload NAME" and "instance type NAME" that `model` has met as `data` defines
    them.
    """
    workloads = definition_digests(data.workloads, "workload")
    types = definition_digests(data.instance_types, "name")
    return {
        f"workload {variant(name, mode)}"
        for name, mode in model.trained
        if model.workload_digests.get(name) == workloads.get(name)
    } | {
        f"instance type {name}"
        for name in model.instance_types
        if model.type_digests.get(name) == types.get(name)
    }
