"""Fit on one frame of runs, predict another, and compare.

Errors are |predicted - measured| / measured. Measurements of the predicted frame never enter a
prediction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pandas as pd

from ..domain.cluster import parse_cluster
from ..domain.setup_table import column, modes_of
from ..domain.workload import MODES, Mode
from ..step_time.dataset import TrainingData, exchanges, flops_per_sample, valid_runs
from ..step_time.model import StepTimeModel, all_introduced, fit
from ..step_time.setup_arrays import variant
from .cross_validation import scores

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
_MOST_NAMED = 8  # names in a sentence


def backtest(data: TrainingData, test: pd.DataFrame, *, seed: int) -> pd.DataFrame:
    """Fit on `data` and predict `test` (measurement columns) on the same index.

    Returns:
        predicted_step_s with its 90 % interval low_s..high_s, NaN where nothing can be predicted;
        unpredicted, the reason; guessed, whether only facts inform the workload.

    Raises:
        ValueError: if there is nothing to learn from, or rows are of several providers.
    """
    asked = test[[name for name in _SETUP if name in test.columns]]
    model = fit(replace(data, instance_types=_described(data, asked)), seed=seed)
    rows = replace(data, runs=test)  # a test row's facts about its workload count
    sizes = {name: one.gradient_bytes for name, one in (exchanges(rows) | exchanges(data)).items()}
    model = all_introduced(model, flops_per_sample(rows) | flops_per_sample(data), sizes)
    number = asked.groupby(list(asked.columns), sort=False, dropna=False).ngroup().to_numpy()
    distinct = asked[~pd.Series(number).duplicated().to_numpy()]
    reasons = np.array(_reasons(model, distinct), dtype=object)
    good = reasons == ""
    seconds = np.full((len(distinct), len(PREDICTED)), np.nan)
    if good.any():
        seconds[good] = model.predict(distinct[good])[_MODEL].to_numpy(float)
    guessed = good & distinct["workload"].isin(list(model.guessed)).to_numpy()
    found = pd.DataFrame(seconds[number], index=test.index, columns=list(PREDICTED))
    return found.assign(unpredicted=reasons[number], guessed=guessed[number])


def _types(frame: pd.DataFrame) -> set[str]:
    return {name for cluster in frame["cluster"].unique() for name in parse_cluster(str(cluster))}


def _described(data: TrainingData, asked: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each instance type of the rows; one device where their number is unknown."""
    known = data.instance_types.drop_duplicates("name").set_index("name")
    found = known.reindex(pd.Index(sorted(_types(data.runs) | _types(asked)), name="name"))
    devices = found["devices"].astype(float).fillna(1).astype(int)
    return found.assign(devices=devices).reset_index()


def _reasons(model: StepTimeModel, asked: pd.DataFrame) -> list[str]:
    """Return (rows,) why each row cannot be predicted; empty where it can."""
    rows = zip(asked["workload"], modes_of(asked), asked["cluster"], strict=True)
    return [_reason(model, str(workload), mode, str(name)) for workload, mode, name in rows]


def _reason(model: StepTimeModel, workload: str, mode: Mode, cluster: str) -> str:
    name = variant(workload, mode)
    if mode not in MODES:
        return f"{mode} is not predicted"
    if name in model.guessed:
        unrated = sorted(one for one in set(parse_cluster(cluster)) if not model.can_guess(one))
        devices = f"the peak rate of the devices of {_listed(unrated)} is unknown"
        return f"workload {name}: {devices}" if unrated else ""
    if (workload, mode) in model.trained:
        return ""
    if (workload, Mode()) in model.trained:
        return f"workload {name}: TRAIN has no row in that mode"
    return f"workload {name}: TRAIN does not show its compute, its flops_per_sample is unknown"


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
        for group, part in rows.groupby(by)
    ]
    return pd.DataFrame(found, columns=list(COLUMNS))


def notes(data: TrainingData, test: pd.DataFrame, predicted: pd.DataFrame) -> tuple[str, ...]:
    """Return sentences on what was left out and assumed."""
    reasons = Counter(reason for reason in predicted["unpredicted"] if reason)
    guesses = Counter(test["workload"].astype(str)[predicted["guessed"].to_numpy(bool)])
    unlearned = len(data.runs) - len(valid_runs(data.runs))
    types = data.instance_types
    strangers = _types(test) - _types(data.runs) - set(types["name"])
    runs = pd.concat([data.runs, test])
    bare = runs[column(runs, "layout", "").astype(str).str.strip() == ""]
    assumed = _types(bare) - set(types["name"][types["devices"].astype(float) > 0])
    counted = f"{len(test)} rows"
    sentences = {
        f"{reasons.total()} of {counted} have no prediction - {_counted(reasons)}": reasons,
        f"{guesses.total()} of {counted} are guessed from flops_per_sample alone"
        f" - {_counted(guesses)}": guesses,
        f"{unlearned} of {len(data.runs)} rows of TRAIN are of modes not predicted": unlearned,
        f"taken for a typical machine: {_listed(sorted(strangers))}": strangers,
        f"one device is assumed without a layout: {_listed(sorted(assumed))}": assumed,
    }
    return tuple(sentence for sentence, is_due in sentences.items() if is_due)


def _counted(counts: Counter[str]) -> str:
    return _listed(f"{name}: {count}" for name, count in sorted(counts.items()))


def _listed(names: Iterable[str]) -> str:
    named = list(names)
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return ", ".join(named[:_MOST_NAMED]) + more
