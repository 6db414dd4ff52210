"""How good would this be on these measurements: fit on one frame of runs, predict another, compare.

Errors are |predicted - measured| / measured. The model's 90 % interval is its mean +- 1.645 spreads of log seconds;
narrower ones follow from it as those of a normal. What was measured in the frame predicted never enters a prediction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import replace

import numpy as np
import pandas as pd

from ..domain.cluster import parse_cluster
from ..domain.setup_table import column, modes_of
from ..domain.workload import MODE_COLUMNS, Mode
from ..step_time.dataset import TrainingData, exchanges, flops_per_sample, valid_runs
from ..step_time.model import StepTimeModel, all_introduced, fit
from .cross_validation import scores

PREDICTED = ("predicted_step_s", "low_s", "high_s")
COLUMNS = (
    *("by", "group", "rows", "mean_error", "median_error", "p90_error"),
    *("coverage_50", "coverage_80", "coverage_90", "median_width"),
)
# All of a row that a prediction may see: neither what was measured nor where it came from.
_ASKED = (
    *("workload", "cluster", "layout", "batch_per_device", "accumulation_steps"),
    *("strategy", "precision", "switches", "provider"),
)
_MACHINE = (
    "name",
    "devices",
    "device",
    "cores",
    "bandwidth_gbps",
    "memory_gib",
    "device_memory_gib",
    "device_tflops",
)
# Setups handed to the model at once, so that a million fit into memory; names in a sentence.
_AT_ONCE, _MOST_NAMED = 20_000, 8


def backtest(data: TrainingData, test: pd.DataFrame, *, seed: int) -> pd.DataFrame:
    """Fit on `data`, predict `test` (measurement columns; step_s and sync_s are not looked at), on the same index.

    Columns: predicted_step_s with its 90 % interval low_s..high_s in seconds, NaN where nothing can be predicted;
    unpredicted, the reason, empty elsewhere; guessed, whether the prediction is a first guess from the facts of a
    workload whose rows tell nothing. An instance type that nobody describes is allowed. Raises ValueError where `data`
    has nothing to learn from, or where there are rows of several providers.
    """
    asked = test[[name for name in _ASKED if name in test.columns]]
    model = _acquainted(
        fit(replace(data, instance_types=described(data, asked)), seed=seed), data, test
    )
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


def _acquainted(model: StepTimeModel, data: TrainingData, test: pd.DataFrame) -> StepTimeModel:
    """With those workloads of the facts that it learned nothing of; what a test row tells of its workload is a fact."""
    flops: dict[str, float] = {}
    sizes: dict[str, float] = {}
    for facts in (replace(data, runs=test), data):
        flops |= flops_per_sample(facts)
        sizes |= {name: one.gradient_bytes for name, one in exchanges(facts).items()}
    return all_introduced(model, flops, sizes)


def _predict(
    model: StepTimeModel, asked: pd.DataFrame
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """(rows, 3) seconds: every distinct setup is predicted once."""
    number = asked.groupby(
        list(asked.columns), sort=False, dropna=False
    ).ngroup()  # by first appearance
    distinct = asked[~number.duplicated()]
    parts = [
        model.predict(distinct.iloc[first : first + _AT_ONCE])[
            ["step_s", "step_low_s", "step_high_s"]
        ].to_numpy(float)
        for first in range(0, len(distinct), _AT_ONCE)
    ]
    return np.concatenate(parts)[number.to_numpy()]


def _types(frame: pd.DataFrame) -> set[str]:
    return {name for cluster in frame["cluster"].unique() for name in parse_cluster(str(cluster))}


def described(data: TrainingData, asked: pd.DataFrame) -> pd.DataFrame:
    """The instance types that the rows mention, those that nobody describes too.

    Where devices are unknown there is one.
    """
    known = (
        data.instance_types.reindex(columns=list(_MACHINE))
        .drop_duplicates("name")
        .set_index("name")
    )
    found = known.reindex(sorted(_types(data.runs) | _types(asked)))
    found["devices"] = found["devices"].astype(float).fillna(1).astype(int)
    return found.rename_axis("name").reset_index()


def _reasons(
    model: StepTimeModel, runs: pd.DataFrame, asked: pd.DataFrame
) -> np.ndarray[tuple[int, ...], np.dtype[np.object_]]:
    """(rows,) why each row cannot be predicted; empty where it can."""
    met = (
        set(zip(runs["workload"].astype(str), modes_of(runs), strict=True)) if len(runs) else set()
    )
    pairs = [
        ((str(workload), mode), str(cluster))
        for workload, mode, cluster in zip(
            asked["workload"], modes_of(asked), asked["cluster"], strict=True
        )
    ]
    unknown = {pair: _unknown(model, *pair, met) for pair in set(pairs)}
    found = np.array([unknown[pair] for pair in pairs], dtype=object)
    for name, known in MODE_COLUMNS.items():
        for at, value in enumerate(str(one) for one in column(asked, name, known[0])):
            if value not in (*known, ""):
                found[at] = f"{name} {value} (only {', '.join(known)} are predicted)"
    return found


def _unknown(
    model: StepTimeModel, trained: tuple[str, Mode], cluster: str, met: Set[tuple[str, Mode]]
) -> str:
    """Why not even a first guess can be made of a workload whose rows tell nothing; empty where there is no need."""
    workload, mode = trained
    label = workload if mode == Mode() else f"{workload} in {mode}"
    if trained not in model.trained and (workload, Mode()) in model.trained:
        return f"workload {label} (TRAIN has no row of it in that mode)"
    if label not in model.guessed:
        wanting = "" if trained in model.trained else "its flops_per_sample"
    else:
        unknown = sorted(name for name in set(parse_cluster(cluster)) if not model.can_guess(name))
        wanting = f"the peak rate of the devices of {_listed(unknown)}" if unknown else ""
    why = "TRAIN cannot tell its compute" if trained in met else "TRAIN has no row of it"
    return f"workload {label} ({why}, and nobody knows {wanting})" if wanting else ""


def summary(test: pd.DataFrame, predicted: pd.DataFrame) -> pd.DataFrame:
    """Errors and coverage of `backtest`'s frame against the step_s of `test`, by workload, by instances, and for all.

    Columns as in COLUMNS, errors, coverage and width as parts of one; median_width is (high - low) / predicted of the
    90 % interval. Rows without prediction are left out.
    """
    good = np.flatnonzero(predicted["unpredicted"] == "")
    names = dict(zip(PREDICTED, ("step_s", "step_low_s", "step_high_s"), strict=True))
    rows = (
        predicted.rename(columns=names)
        .iloc[good]
        .assign(
            measured_s=test["step_s"].astype(float).iloc[good],
            workload=test["workload"].astype(str).iloc[good],
            instances=[len(parse_cluster(str(one))) for one in test["cluster"].iloc[good]],
        )
    )
    found: list[dict[str, object]] = []
    for by in ("workload", "instances"):
        for group, part in rows.groupby(by, sort=True):
            found.append({"by": by, "group": str(group), **scores(part)})
    if len(rows):
        found.append({"by": "all", "group": "all", **scores(rows)})
    return pd.DataFrame(found, columns=list(COLUMNS))


def notes(data: TrainingData, test: pd.DataFrame, predicted: pd.DataFrame) -> tuple[str, ...]:
    """Sentences on what was left out and what was assumed."""
    found = []
    reasons = Counter(one for one in predicted["unpredicted"] if one)
    if reasons:
        named = _listed(f"{reason}: {count}" for reason, count in sorted(reasons.items()))
        found.append(f"{reasons.total()} of {len(test)} rows are without prediction - {named}")
    guesses = Counter(
        str(one) for one in test["workload"].iloc[np.flatnonzero(predicted["guessed"])]
    )
    if guesses:
        named = _listed(f"{name}: {count}" for name, count in sorted(guesses.items()))
        found.append(
            f"{guesses.total()} of {len(test)} rows are first guesses from flops_per_sample alone, since TRAIN tells"
            f" nothing of the workload - {named}"
        )
    unlearned = len(data.runs) - len(valid_runs(data.runs))
    if unlearned:
        found.append(
            f"{unlearned} of {len(data.runs)} rows of TRAIN are in no mode that is predicted and were not learned from"
        )
    strangers = (
        _types(test)
        - _types(data.runs)
        - set(data.instance_types.reindex(columns=["name"])["name"])
    )
    if strangers:
        found.append(
            f"taken for a typical machine, since nobody knows them: {_listed(sorted(strangers))}"
        )
    assumed = _of_unknown_devices(data, test)
    if assumed:
        found.append(
            f"one device is assumed where layout is empty, since nobody says how many: {_listed(assumed)}"
        )
    return tuple(found)


def _of_unknown_devices(data: TrainingData, test: pd.DataFrame) -> list[str]:
    """Types in rows without layout whose devices no description gives."""
    types = data.instance_types.reindex(columns=["name", "devices"])
    known = {
        str(name)
        for name, many in zip(types["name"], types["devices"], strict=True)
        if many and many == many
    }
    bare = [
        frame[[not str(one).strip() for one in column(frame, "layout", "")]]
        for frame in (data.runs, test)
    ]
    return sorted(_types(pd.concat([one[["cluster"]] for one in bare])) - known)


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return ", ".join(every[:_MOST_NAMED]) + more
