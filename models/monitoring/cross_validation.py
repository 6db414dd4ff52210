"""How good is the model on setups it has not seen.

Splits leave whole groups out and fit again without them: a workload's multi-machine rows, a number of instances, a
workload on a cluster. Errors are |predicted - measured| / measured, as parts of one; coverage is of the 90 % interval.
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
COLUMNS = (
    "split",
    "group",
    "rows",
    "mean_error",
    "median_error",
    "p90_error",
    "coverage_90",
    "median_width",
)
_SECONDS = ("measured_s", "step_s", "step_low_s", "step_high_s")
_FOLDS = 5  # of the split by setup

HeldOut = tuple[str, str, TrainingData, pd.DataFrame]
# A `map`: it may do its work wherever it likes, if its results come in order.
Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


def held_out(data: TrainingData, *, seed: int) -> Iterator[HeldOut]:
    """(split, group, training data without the group, the group's rows)."""
    runs = valid_runs(data.runs).reset_index(drop=True)
    if not len(runs):
        return
    types = [parse_cluster(str(one)) for one in runs["cluster"]]
    size = np.array([len(one) for one in types])
    composition = np.array([cluster_name(sorted(one)) for one in types])
    workload = np.array(labels(runs))
    for name in sorted(set(workload)):
        out = (workload == name) & (size > 1)
        yield "workload", name, replace(data, runs=runs[~out]), runs[out]
    for count in sorted(set(size)):
        # the probes of clusters that large go too: nobody measured there
        probes = data.probes
        if "cluster" in probes and count > 1:
            probes = probes[[len(parse_cluster(str(one))) != count for one in probes["cluster"]]]
        yield (
            "cluster_size",
            str(count),
            replace(data, runs=runs[size != count], probes=probes),
            runs[size == count],
        )
    groups = np.array([f"{one} on {two}" for one, two in zip(workload, composition, strict=True)])
    names = sorted(set(groups))
    order = np.random.default_rng(seed).permutation(len(names))
    folds = {name: int(at) % _FOLDS for name, at in zip(names, order, strict=True)}
    fold = np.array([folds[name] for name in groups])
    for at in sorted(set(fold)):
        yield "setup", f"fold {at}", replace(data, runs=runs[fold != at]), runs[fold == at]


def fitted(
    data: TrainingData, *, seed: int, each: Each = map
) -> tuple[StepTimeModel, pd.DataFrame]:
    """The model of all the data, and each held-out row with what a model that never saw it predicts.

    Columns: split, group, row (place among the valid runs: the same in every split), run_id, setup (workload on
    sorted cluster), measured_s, step_s, step_low_s, step_high_s. Each fit is an item for `each`. A group whose workload
    nothing else tells about is left out. Raises ValueError as `fit` does.
    """
    model = fit(data, seed=seed)
    found = each(partial(_fitted, seed=seed, calibrated=model), held_out(data, seed=seed))
    known = [one for one in found if one is not None]
    return model, pd.concat(known, ignore_index=True) if known else _nothing()


def _fitted(work: HeldOut, *, seed: int, calibrated: StepTimeModel) -> pd.DataFrame | None:
    split, group, training, rows = work
    try:
        predicted = fit(training, seed=seed, calibrated=calibrated).predict(_unanswered(rows))
    except ValueError:
        return None
    return _scored(split, group, rows, predicted)


def _unanswered(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.drop(columns=["step_s", "sync_s"], errors="ignore")


def _scored(split: str, group: str, rows: pd.DataFrame, predicted: pd.DataFrame) -> pd.DataFrame:
    clusters = [cluster_name(sorted(parse_cluster(str(one)))) for one in rows["cluster"]]
    return pd.DataFrame(
        {
            "split": split,
            "group": group,
            "row": rows.index,
            "run_id": rows["run_id"].astype(str) if "run_id" in rows else "",
            "setup": [f"{one} on {two}" for one, two in zip(labels(rows), clusters, strict=True)],
            "measured_s": rows["step_s"].astype(float),
            "step_s": predicted["step_s"],
            "step_low_s": predicted["step_low_s"],
            "step_high_s": predicted["step_high_s"],
        },
        index=rows.index,
    )


def labels(rows: pd.DataFrame) -> list[str]:
    """Each row's workload, with its mode where that is not the usual one."""
    pairs = zip(rows["workload"].astype(str), modes_of(rows), strict=True)
    return [_label(workload, mode) for workload, mode in pairs]


def _label(workload: str, mode: Mode) -> str:
    return workload if mode == Mode() else f"{workload} in {mode}"


def _nothing() -> pd.DataFrame:
    texts = ("split", "group", "row", "run_id", "setup")
    columns = {name: pd.Series(dtype=object) for name in texts} | {
        name: pd.Series(dtype=float) for name in _SECONDS
    }
    return pd.DataFrame(columns)


def summarise(scored: pd.DataFrame) -> pd.DataFrame:
    """The scoreboard of held-out rows: columns COLUMNS, a row a group, and the group "all" that pools each split.

    `median_width` is (high - low) / predicted.
    """
    rows: list[dict[str, object]] = []
    for split in SPLITS:
        own = scored[scored["split"] == split]
        groups = [(str(name), part) for name, part in own.groupby("group", sort=True)]
        for name, part in [*groups, ("all", own)]:
            if len(part):
                rows.append({"split": split, "group": name, **scores(part)})
    return pd.DataFrame(rows, columns=list(COLUMNS))


def scores(rows: pd.DataFrame) -> dict[str, float | int]:
    """Rows, errors, coverage by interval and median width of rows with measured_s, step_s, step_low_s, step_high_s."""
    measured, step, low, high = (rows[name].to_numpy(float) for name in _SECONDS)
    error = np.abs(step / measured - 1)
    return {
        "rows": len(rows),
        "mean_error": float(error.mean()),
        "median_error": float(np.median(error)),
        "p90_error": float(np.quantile(error, 0.9)),
        **{
            f"coverage_{part}": float(found.mean())
            for part, found in inside(measured, low, high).items()
        },
        "median_width": float(np.median((high - low) / step)),
    }


def inside(measured_s: FloatArray, low_s: FloatArray, high_s: FloatArray) -> dict[int, BoolArray]:
    """(rows,) is each row inside its central interval of 50, 80 and 90 %? `low_s`..`high_s` is the last of these.

    The distribution is log-normal.
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # an end at 0 has no narrower intervals
        measured, low, high = np.log(measured_s), np.log(low_s), np.log(high_s)
        spreads = np.abs(measured - (low + high) / 2) / ((high - low) / (2 * Z_90))
    found = {
        round(100 * one): np.asarray(spreads <= ndtri((1 + one) / 2), dtype=bool) for one in LEVELS
    }
    return found | {90: np.asarray((low_s <= measured_s) & (measured_s <= high_s), dtype=bool)}


def calibration(scored: pd.DataFrame) -> pd.DataFrame:
    """Stated against observed coverage of held-out rows, as parts of one: split, stated, observed, rows."""
    rows = [
        {"split": split, "stated": part / 100, "observed": float(found.mean()), "rows": len(own)}
        for split, own in scored.groupby("split", sort=False)
        for part, found in inside(
            *(own[name].to_numpy(float) for name in _SECONDS if name != "step_s")
        ).items()
    ]
    return pd.DataFrame(rows, columns=["split", "stated", "observed", "rows"])


def predictions_of(model: StepTimeModel, data: TrainingData) -> pd.DataFrame:
    """What the fixed `model` predicts for those runs whose workload and instance types it has met as they are now.

    Columns as in `fitted`, with empty split and group (rows that it was trained on flatter it).
    """
    known = known_of(model, data)
    runs = valid_runs(data.runs).reset_index(drop=True)
    mask = [
        known.issuperset(
            {
                ("workload", label),
                *(("instance type", one) for one in parse_cluster(str(cluster))),
            }
        )
        for label, cluster in zip(labels(runs), runs["cluster"], strict=True)
    ]
    rows = runs.loc[np.array(mask, dtype=bool)]
    return _scored("", "", rows, model.predict(_unanswered(rows))) if len(rows) else _nothing()


def known_of(model: StepTimeModel, data: TrainingData) -> set[tuple[str, str]]:
    """("workload", its label) and ("instance type", name) that the model has met with the definitions of `data`."""
    workloads = definition_digests(data.workloads, "workload")
    types = definition_digests(data.instance_types, "name")
    known = {
        ("workload", _label(name, mode))
        for name, mode in model.trained
        if model.workload_digests.get(name) == workloads.get(name)
    }
    return known | {
        ("instance type", name)
        for name in model.instance_types
        if model.type_digests.get(name) == types.get(name)
    }
