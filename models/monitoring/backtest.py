"""Fit on one frame of runs, predict another, and compare.

Errors are |predicted - measured| / measured. Measurements of the predicted frame never enter a
prediction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import replace

import numpy as np
import pandas as pd

from ..domain.cluster import parse_cluster
from ..domain.numeric import FloatArray
from ..domain.setup_table import column, modes_of
from ..domain.workload import MODE_COLUMNS, Mode
from ..step_time.dataset import TrainingData, exchanges, flops_per_sample, valid_runs
from ..step_time.model import StepTimeModel, all_introduced, fit
from .cross_validation import label, labels, scores

PREDICTED = ("predicted_step_s", "low_s", "high_s")
_MODEL = ["step_s", "step_low_s", "step_high_s"]
COLUMNS = (
    *("by", "group", "rows", "mean_error", "median_error", "p90_error"),
    *("coverage_50", "coverage_80", "coverage_90", "median_width"),
)
# Columns that a prediction may see: neither measurements nor their origin.
_SETUP = [
    *("workload", "cluster", "layout", "batch_per_device", "accumulation_steps"),
    *("strategy", "precision", "switches", "provider"),
]
_MACHINE = [
    *("name", "devices", "device", "cores", "bandwidth_gbps", "memory_gib"),
    *("device_memory_gib", "device_tflops"),
]
_BATCH, _MOST_NAMED = 20_000, 8  # setups predicted at once; names in a sentence


def backtest(data: TrainingData, test: pd.DataFrame, *, seed: int) -> pd.DataFrame:
    """Fit on `data` and predict `test` (measurement columns) on the same index.

    Returns:
        predicted_step_s with its 90 % interval low_s..high_s, NaN where nothing can be predicted;
        unpredicted, the reason; guessed, whether only facts inform the workload.

    Raises:
        ValueError: if there is nothing to learn from, or rows are of several providers.
    """
    asked = test[[name for name in _SETUP if name in test.columns]]
    model = fit(replace(data, instance_types=described(data, asked)), seed=seed)
    flops: dict[str, float] = {}
    sizes: dict[str, float] = {}
    for facts in (replace(data, runs=test), data):  # a test row's facts about its workload count
        flops |= flops_per_sample(facts)
        sizes |= {name: one.gradient_bytes for name, one in exchanges(facts).items()}
    model = all_introduced(model, flops, sizes)
    reasons = _reasons(model, data.runs, asked)
    found = pd.DataFrame(np.nan, index=test.index, columns=list(PREDICTED))
    good = np.flatnonzero(reasons == "")
    if len(good):
        found.iloc[good] = _predict(model, asked.iloc[good])
        seconds = found.to_numpy(float)
        unsound = (reasons == "") & ~(np.isfinite(seconds) & (seconds > 0)).all(axis=1)
        found[unsound] = np.nan
        reasons[unsound] = "no finite time"
    guesses = asked["workload"].astype(str).isin(list(model.guessed)).to_numpy(bool)
    return found.assign(unpredicted=reasons, guessed=guesses & (reasons == ""))


def _predict(model: StepTimeModel, asked: pd.DataFrame) -> FloatArray:
    """Return (rows, 3) seconds; every distinct setup is predicted once."""
    number = asked.groupby(list(asked.columns), sort=False, dropna=False).ngroup()
    distinct = asked[~number.duplicated()]
    parts = [
        model.predict(distinct.iloc[first : first + _BATCH])[_MODEL].to_numpy(float)
        for first in range(0, len(distinct), _BATCH)
    ]
    return np.concatenate(parts)[number.to_numpy()]


def _types(frame: pd.DataFrame) -> set[str]:
    return {name for cluster in frame["cluster"].unique() for name in parse_cluster(str(cluster))}


def described(data: TrainingData, asked: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each instance type of the rows; one device where their number is unknown."""
    known = data.instance_types.reindex(columns=_MACHINE).drop_duplicates("name").set_index("name")
    found = known.reindex(sorted(_types(data.runs) | _types(asked)))
    found["devices"] = found["devices"].astype(float).fillna(1).astype(int)
    return found.rename_axis("name").reset_index()


def _reasons(model: StepTimeModel, runs: pd.DataFrame, asked: pd.DataFrame) -> np.ndarray:
    """Return (rows,) why each row cannot be predicted; empty where it can."""
    measured = set(labels(runs)) if len(runs) else set()
    rows = zip(asked["workload"], modes_of(asked), asked["cluster"], strict=True)
    keys = [(str(workload), mode, str(cluster)) for workload, mode, cluster in rows]
    unknown = {key: _unknown(model, *key, measured) for key in set(keys)}
    found = np.array([unknown[key] for key in keys], dtype=object)
    for name, known in MODE_COLUMNS.items():
        values = column(asked, name, known[0]).astype(str)
        for value in set(values) - {*known, ""}:
            found[(values == value).to_numpy()] = f"{name} {value} is not predicted"
    return found


def _unknown(
    model: StepTimeModel, workload: str, mode: Mode, cluster: str, measured: Set[str]
) -> str:
    """Return why a workload whose rows inform nothing cannot even be guessed; empty if not so."""
    name, is_known = label(workload, mode), (workload, mode) in model.trained
    if not is_known and (workload, Mode()) in model.trained:
        return f"workload {name}: TRAIN has no row in that mode"
    unknown = sorted(one for one in set(parse_cluster(cluster)) if not model.can_guess(one))
    if name in model.guessed and unknown:
        wanting = f"the peak rate of the devices of {_listed(unknown)} is unknown"
    elif name not in model.guessed and not is_known:
        wanting = "its flops_per_sample is unknown"
    else:
        return ""
    rows = "rows of TRAIN do not show its compute" if name in measured else "TRAIN has no row of it"
    return f"workload {name}: {rows}, and {wanting}"


def summary(test: pd.DataFrame, predicted: pd.DataFrame) -> pd.DataFrame:
    """Return errors and coverage (COLUMNS) by workload, by number of instances, and for all
    rows.
    """
    good = (predicted["unpredicted"] == "").to_numpy()
    rows = predicted.rename(columns=dict(zip(PREDICTED, _MODEL, strict=True)))[good].assign(
        measured_s=test["step_s"].astype(float)[good],
        workload=test["workload"].astype(str)[good],
        instances=[len(parse_cluster(str(name))) for name in test["cluster"][good]],
        all="all",
    )
    found = [
        {"by": by, "group": str(group), **scores(part)}
        for by in ("workload", "instances", "all")
        for group, part in rows.groupby(by, sort=True)
    ]
    return pd.DataFrame(found, columns=list(COLUMNS))


def notes(data: TrainingData, test: pd.DataFrame, predicted: pd.DataFrame) -> tuple[str, ...]:
    """Return sentences on what was left out and assumed."""
    found = []
    reasons = Counter(reason for reason in predicted["unpredicted"] if reason)
    if reasons:
        found.append(
            f"{reasons.total()} of {len(test)} rows have no prediction - {_counted(reasons)}"
        )
    guesses = Counter(test["workload"].astype(str)[predicted["guessed"].to_numpy(bool)])
    if guesses:
        found.append(
            f"{guesses.total()} of {len(test)} rows are guessed from flops_per_sample alone"
            f" - {_counted(guesses)}"
        )
    unlearned = len(data.runs) - len(valid_runs(data.runs))
    if unlearned:
        found.append(f"{unlearned} of {len(data.runs)} rows of TRAIN are of modes not predicted")
    types = data.instance_types.reindex(columns=["name", "devices"])
    strangers = _types(test) - _types(data.runs) - set(types["name"])
    if strangers:
        found.append(f"taken for a typical machine: {_listed(sorted(strangers))}")
    with_devices = set(types[types["devices"].fillna(0).astype(float) > 0]["name"])
    bare = [
        frame[column(frame, "layout", "").astype(str).str.strip() == ""]
        for frame in (data.runs, test)
    ]
    assumed = _types(pd.concat(bare)) - with_devices
    if assumed:
        found.append(f"one device is assumed without a layout: {_listed(sorted(assumed))}")
    return tuple(found)


def _counted(counts: Counter[str]) -> str:
    return _listed(f"{name}: {count}" for name, count in sorted(counts.items()))


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return ", ".join(every[:_MOST_NAMED]) + more
