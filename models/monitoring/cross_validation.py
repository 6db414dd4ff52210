"""Measure the model's errors and interval coverage on setups that it was not fitted to.

A split divides the runs into groups. For each group of each split, a model is fitted without the
group's runs and then predicts them. There are three splits, with these groups:

    workload       all multi-machine runs of a workload in a mode
    cluster_size   all runs on clusters with the same number of instances
    setup          the runs of a random fifth of all combinations of workload, mode and cluster

If there are more than eight combinations of workload and mode, the split `workload` distributes
them at random over eight groups. A group can then have the runs of several combinations.

Errors are |predicted - measured| / measured. Coverage is the share of measurements within their
90 % interval.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..domain.cluster import cluster_name
from ..domain.numeric import IntArray
from ..domain.setup_table import column, modes_of, types_of
from ..domain.workload import label
from ..step_time.dataset import TrainingData, definition_digests, valid_runs
from ..step_time.model import StepTimeModel, fit

SPLITS = ("workload", "cluster_size", "setup")
STEP = ["step_s", "step_low_s", "step_high_s"]
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
_SCORED = [*STEP, "split", "group", "row", "run_id", "setup", "measured_s"]
_FOLDS, _MOST_GROUPS = 5, 8  # groups of the split "setup"; maximum groups of the split "workload"

# Split, group, training data without the group, and the runs of the group.
HeldOut = tuple[str, str, TrainingData, pd.DataFrame]
# A function like `map` that returns results in order; it may call the function in other processes.
Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


def held_out(data: TrainingData, *, seed: int) -> Iterator[HeldOut]:
    """Yield (split, group name, training data without the group, runs of the group).

    A split divides the runs into groups. In the split `cluster_size`, a group has all runs on
    clusters of the same size. If this size is above 1, the training data also lack the probes
    (all-reduce measurements) on these clusters.
    """
    runs = valid_runs(data.runs).reset_index(drop=True)
    size = machines(runs)
    setup = _folds(np.array(_setups(runs), dtype=object), _FOLDS, seed)
    labels = np.array(_labels(runs))
    if len(set(labels.tolist())) > _MOST_GROUPS:
        labels = _folds(labels, _MOST_GROUPS, seed)
    for split, keys in zip(SPLITS, (labels, size, setup), strict=True):
        for group in sorted(set(keys.tolist())):
            out = keys == group
            probes = data.probes
            if split == "workload":
                out &= size > 1
            if split == "cluster_size" and group > 1 and len(probes):
                probes = probes[machines(probes) != group]
            training = replace(data, runs=runs[~out], probes=probes)
            yield split, str(group), training, runs[out]


def _folds(labels: NDArray[Any], count: int, seed: int) -> NDArray[Any]:
    """Return the name of a random fold for each of `labels`.

    There are `count` folds. Equal labels get the same fold.
    """
    codes, names = pd.factorize(labels, sort=True)
    fold = np.random.default_rng(seed).permutation(len(names))[codes] % count
    return np.array([f"fold {number}" for number in fold])


def _labels(rows: pd.DataFrame) -> list[str]:
    """Return a text with the workload and mode of each row, such as `resnet in bf16 fsdp`."""
    return list(map(label, rows["workload"], modes_of(rows)))


def machines(rows: pd.DataFrame) -> IntArray:
    """Return a (rows,) array: the number of machines of each row's cluster."""
    return np.array([len(types_of(name)) for name in rows["cluster"]], dtype=int)


def _setups(rows: pd.DataFrame) -> list[str]:
    """Return a text for each row, such as `resnet in bf16 fsdp on 2xg5.xlarge`.

    The machines of the cluster are sorted by instance type.
    """
    clusters = [cluster_name(sorted(types_of(name))) for name in rows["cluster"]]
    return [f"{work} on {name}" for work, name in zip(_labels(rows), clusters, strict=True)]


def fit_and_score(
    data: TrainingData, *, seed: int, each: Each = map
) -> tuple[StepTimeModel, pd.DataFrame]:
    """Return the model fitted to all data, and a frame of held-out predictions.

    The docstring of the module describes the splits and their groups. The frame has a row for each
    split and run. A group has no rows if the fit to the other runs fails, or if the group's runs
    cannot be predicted. The columns are:

        split, group             the split, and the group that has the run
        row, run_id              the position of the run among the valid runs, and its id
        setup                    a text with the workload, mode and cluster
        measured_s               measured seconds per step
        step_s                   predicted seconds per step
        step_low_s, step_high_s  90 % interval of the prediction

    Args:
        data: one provider's measurements.
        seed: the random seed of the fits and of the folds.
        each: a function like `map`. It is called to fit a model for each group, for example in
            several processes.

    Raises:
        ValueError: if the model cannot be fitted to `data`.
    """
    model = fit(data, seed=seed)
    scored = each(partial(_held_out_scores, seed=seed), held_out(data, seed=seed))
    return model, pd.concat([pd.DataFrame(columns=_SCORED), *scored], ignore_index=True)


def _held_out_scores(work: HeldOut, *, seed: int) -> pd.DataFrame | None:
    """Fit a model without one group of runs, and return its predictions of these runs.

    `work` is an item of `held_out`. Returns None if the model cannot be fitted or cannot predict
    the runs.
    """
    split, group, training, rows = work
    try:
        model = fit(training, seed=seed)
        return _score(rows, model).assign(split=split, group=group)
    except ValueError:
        return None


def _score(rows: pd.DataFrame, model: StepTimeModel) -> pd.DataFrame:
    """Return the model's predictions of the runs in `rows`, next to the measured step times."""
    return model.predict(rows)[STEP].assign(
        row=rows.index,
        run_id=column(rows, "run_id", ""),
        setup=_setups(rows),
        measured_s=rows["step_s"],
    )


def summarise(scored: pd.DataFrame) -> pd.DataFrame:
    """Return errors and interval coverage, with a row for each split and group of held-out runs.

    `scored` is the frame that `fit_and_score` returns. The columns of the result are COLUMNS. Each
    split also has a row for the group "all", which has all its runs. `median_width` is the median
    of (high - low) / predicted.
    """
    rows = [
        {"split": split, "group": name, **scores(group)}
        for split, of_split in scored.groupby("split", sort=False)
        for name, group in [*of_split.groupby("group"), ("all", of_split)]
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def scores(rows: pd.DataFrame) -> dict[str, float | int]:
    """Return statistics of predictions: row count, errors, interval coverage and interval width.

    `rows` has the columns measured_s, step_s, step_low_s and step_high_s.
    """
    measured, step, low, high = (rows[name].to_numpy(float) for name in ("measured_s", *STEP))
    error = abs(step / measured - 1)
    return {
        "rows": len(rows),
        "mean_error": error.mean(),
        "median_error": np.median(error),
        "p90_error": np.quantile(error, 0.9),
        "coverage_90": ((low <= measured) & (measured <= high)).mean(),
        "median_width": np.median((high - low) / step),
    }


def predictions_of(model: StepTimeModel, data: TrainingData) -> pd.DataFrame:
    """Return predictions for the runs whose workload and instance types `model` knows.

    `known_of` defines which workloads and instance types are known. The runs that the model was
    trained on are included, and their errors are smaller. The result has the columns row, run_id,
    setup, measured_s, step_s, step_low_s and step_high_s, which `fit_and_score` describes.
    """
    known = known_of(model, data)
    runs = valid_runs(data.runs).reset_index(drop=True)
    predictable = [
        f"workload {name}" in known and all(f"instance type {name}" in known for name in types)
        for name, types in zip(_labels(runs), runs["cluster"].map(types_of), strict=True)
    ]
    return _score(runs[np.array(predictable, bool)], model)


def known_of(model: StepTimeModel, data: TrainingData) -> set[str]:
    """Return the names of the workloads (with modes) and instance types that `model` can predict.

    Examples are "workload resnet in bf16 fsdp" and "instance type g5.xlarge". The text "workload
    resnet" stands for the default mode. A workload or type is left out if its definition in `data`
    differs from its definition when the model was trained.
    """
    workloads = definition_digests(data.workloads, "workload")
    types = definition_digests(data.instance_types, "name")
    return {
        f"workload {label(name, mode)}"
        for name, mode in model.trained
        if model.workload_digests.get(name) == workloads.get(name)
    } | {
        f"instance type {name}"
        for name in model.instance_types
        if model.type_digests.get(name) == types.get(name)
    }
