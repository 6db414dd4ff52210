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

from ..domain.cluster import cluster_name, parse_cluster
from ..domain.numeric import Z_90, BoolArray, FloatArray
from ..domain.setup_table import modes_of
from ..domain.workload import Mode
from ..step_time.dataset import TrainingData, definition_digests, valid_runs
from ..step_time.model import StepTimeModel, fit

SPLITS = ("workload", "cluster_size", "setup")
LEVELS = (0.5, 0.8, 0.9)  # of intervals
_ERRORS = ("rows", "mean_error", "median_error", "p90_error", "coverage_90", "median_width")
COLUMNS = ("split", "group", *_ERRORS)
_SECONDS = ["measured_s", "step_s", "step_low_s", "step_high_s"]
_SCORED = ["split", "group", "row", "run_id", "setup", *_SECONDS]
_FOLDS = 5  # of the split by setup

HeldOut = tuple[str, str, TrainingData, pd.DataFrame]
# A `map` whose results come in order, wherever it runs.
Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


def held_out(data: TrainingData, *, seed: int) -> Iterator[HeldOut]:
    """Yield (split, group, training data without the group, the group's rows)."""
    runs = valid_runs(data.runs).reset_index(drop=True)
    if not len(runs):
        return
    size = _machines(runs)
    workload = np.array(labels(runs))
    for name in sorted(set(workload)):
        out = (workload == name) & (size > 1)
        yield "workload", name, replace(data, runs=runs[~out]), runs[out]
    for count in sorted(set(size)):
        probes = data.probes  # those of clusters that large go too
        if "cluster" in probes and count > 1:
            probes = probes[_machines(probes) != count]
        training = replace(data, runs=runs[size != count], probes=probes)
        yield "cluster_size", str(count), training, runs[size == count]
    setups = np.array(_setups(runs))
    names = sorted(set(setups))
    order = np.random.default_rng(seed).permutation(len(names))
    fold = pd.Series(setups).map(dict(zip(names, order % _FOLDS, strict=True))).to_numpy()
    for at in sorted(set(fold)):
        yield "setup", f"fold {at}", replace(data, runs=runs[fold != at]), runs[fold == at]


def _machines(rows: pd.DataFrame) -> FloatArray:
    return np.array([len(parse_cluster(str(name))) for name in rows["cluster"]], dtype=float)


def _setups(rows: pd.DataFrame) -> list[str]:
    """Return each row's workload on its sorted cluster."""
    clusters = [cluster_name(sorted(parse_cluster(str(name)))) for name in rows["cluster"]]
    return [f"{label} on {name}" for label, name in zip(labels(rows), clusters, strict=True)]


def labels(rows: pd.DataFrame) -> list[str]:
    """Return each row's workload, with its mode if that is not the usual one."""
    pairs = zip(rows["workload"].astype(str), modes_of(rows), strict=True)
    return [label(workload, mode) for workload, mode in pairs]


def label(workload: str, mode: Mode) -> str:
    return workload if mode == Mode() else f"{workload} in {mode}"


def fitted(
    data: TrainingData, *, seed: int, each: Each = map
) -> tuple[StepTimeModel, pd.DataFrame]:
    """Return the model of all data, and held-out rows with predictions of models without them.

    Columns: split, group, row (place among the valid runs), run_id, setup (workload on sorted
    cluster), measured_s, step_s, step_low_s, step_high_s. Groups that nothing else informs are left
    out. Raises as `fit`.
    """
    model = fit(data, seed=seed)
    found = each(partial(_fitted, seed=seed, calibrated=model), held_out(data, seed=seed))
    known = [rows for rows in found if rows is not None]
    return model, pd.concat(known, ignore_index=True) if known else pd.DataFrame(columns=_SCORED)


def _fitted(work: HeldOut, *, seed: int, calibrated: StepTimeModel) -> pd.DataFrame | None:
    split, group, training, rows = work
    try:
        model = fit(training, seed=seed, calibrated=calibrated)
        return _scored(split, group, rows, model)
    except ValueError:
        return None


def _scored(split: str, group: str, rows: pd.DataFrame, model: StepTimeModel) -> pd.DataFrame:
    predicted = model.predict(rows.drop(columns=["step_s", "sync_s"], errors="ignore"))
    found = predicted[["step_s", "step_low_s", "step_high_s"]].assign(
        split=split,
        group=group,
        row=rows.index,
        run_id=rows["run_id"].astype(str) if "run_id" in rows else "",
        setup=_setups(rows),
        measured_s=rows["step_s"].astype(float),
    )
    return found[_SCORED]


def summarise(scored: pd.DataFrame) -> pd.DataFrame:
    """Return the scoreboard (COLUMNS) by group, with a group "all" that pools each split.

    `median_width` is (high - low) / predicted.
    """
    rows: list[dict[str, object]] = []
    for split in SPLITS:
        own = scored[scored["split"] == split]
        for name, part in [*own.groupby("group", sort=True), ("all", own)]:
            if len(part):
                rows.append({"split": split, "group": str(name), **scores(part)})
    return pd.DataFrame(rows, columns=list(COLUMNS))


def scores(rows: pd.DataFrame) -> dict[str, float | int]:
    """Return rows, errors, coverage by interval and median width of held-out rows."""
    measured, step, low, high = (rows[name].to_numpy(float) for name in _SECONDS)
    error = np.abs(step / measured - 1)
    coverage = {
        f"coverage_{level}": float(found.mean())
        for level, found in inside(measured, low, high).items()
    }
    return {
        "rows": len(rows),
        "mean_error": float(error.mean()),
        "median_error": float(np.median(error)),
        "p90_error": float(np.quantile(error, 0.9)),
        **coverage,
        "median_width": float(np.median((high - low) / step)),
    }


def inside(measured_s: FloatArray, low_s: FloatArray, high_s: FloatArray) -> dict[int, BoolArray]:
    """Return (rows,) whether each is inside its central interval of 50, 80 and 90 %.

    `low_s`..`high_s` is that of 90 %; the distribution is log-normal.
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # an end at 0 has no narrower intervals
        measured, low, high = np.log(measured_s), np.log(low_s), np.log(high_s)
        spreads = np.abs(measured - (low + high) / 2) / ((high - low) / (2 * Z_90))
    found = {
        round(100 * level): np.asarray(spreads <= ndtri((1 + level) / 2), dtype=bool)
        for level in LEVELS
    }
    return found | {90: np.asarray((low_s <= measured_s) & (measured_s <= high_s), dtype=bool)}


def calibration(scored: pd.DataFrame) -> pd.DataFrame:
    """Return stated and observed coverage of held-out rows: split, stated, observed, rows."""
    rows = []
    for split, own in scored.groupby("split", sort=False):
        seconds = (own[name].to_numpy(float) for name in _SECONDS if name != "step_s")
        for level, found in inside(*seconds).items():
            rows.append((split, level / 100, float(found.mean()), len(own)))
    return pd.DataFrame(rows, columns=["split", "stated", "observed", "rows"])


def predictions_of(model: StepTimeModel, data: TrainingData) -> pd.DataFrame:
    """Return predictions of runs whose workload and types `model` has met as they are now.

    Columns as in `fitted`, with empty split and group. Rows that it was trained on flatter it.
    """
    known = known_of(model, data)
    runs = valid_runs(data.runs).reset_index(drop=True)
    mask = []
    for name, cluster in zip(labels(runs), runs["cluster"], strict=True):
        types = {("instance type", one) for one in parse_cluster(str(cluster))}
        mask.append(known >= {("workload", name), *types})
    rows = runs.loc[np.array(mask, dtype=bool)]
    return _scored("", "", rows, model) if len(rows) else pd.DataFrame(columns=_SCORED)


def known_of(model: StepTimeModel, data: TrainingData) -> set[tuple[str, str]]:
    """Return ("workload", label) and ("instance type", name) that `model` met as `data` defines
    them.
    """
    workloads = definition_digests(data.workloads, "workload")
    types = definition_digests(data.instance_types, "name")
    known = {
        ("workload", label(name, mode))
        for name, mode in model.trained
        if model.workload_digests.get(name) == workloads.get(name)
    }
    return known | {
        ("instance type", name)
        for name in model.instance_types
        if model.type_digests.get(name) == types.get(name)
    }
