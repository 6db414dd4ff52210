"""Fit a model to training runs, predict the step times of test runs, and compute the errors.

Errors are |predicted - measured| / measured. Predictions never use measurements of test runs.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd

from ..domain.setup_table import types_of
from ..step_time.dataset import TrainingData, valid_runs, workload_facts
from ..step_time.model import fit, introduce_all
from .cross_validation import STEP, machines, scores

PREDICTED = ("predicted_step_s", "low_s", "high_s")
_KIND = ["workload", "cluster", "strategy", "precision", "switches"]
# Columns that a prediction may use. Measured values are left out.
_SETUP = [*_KIND, "layout", "batch_per_device", "accumulation_steps", "provider"]
_MOST_NAMED = 8  # maximum number of names or reasons in a sentence


def backtest(data: TrainingData, test: pd.DataFrame, *, seed: int) -> pd.DataFrame:
    """Fit a model to `data`, and predict the step times of the measured runs in `test`.

    Returns a frame with the index of `test` and these columns:

        predicted_step_s   predicted seconds per step; NaN if the row cannot be predicted
        low_s, high_s      90 % interval of `predicted_step_s`
        unpredicted        the reason why the row cannot be predicted, or an empty string
        guessed            True if the prediction uses facts about the workload, such as its FLOPs,
                           but no measurements of the workload

    Raises:
        ValueError: if `data` has rows of several providers, or nothing to fit (no profile and no
            valid run).
    """
    setups = test[[name for name in _SETUP if name in test.columns]].reset_index(drop=True)
    names = {name for cluster in setups["cluster"] for name in types_of(cluster)}
    # A type that the catalogue does not describe is predicted with medians of the measured types.
    types = data.instance_types.merge(pd.DataFrame({"name": sorted(names)}), how="outer")
    model = fit(replace(data, instance_types=types), seed=seed)
    rows = replace(data, runs=test)  # facts that test rows state about their workload may be used
    model = introduce_all(model, workload_facts(rows) | workload_facts(data))
    found = pd.DataFrame(np.nan, setups.index, list(PREDICTED)).assign(unpredicted="")
    for _, same in setups.groupby([name for name in _KIND if name in setups], dropna=False):
        try:
            found.loc[same.index, list(PREDICTED)] = model.predict(same)[STEP].to_numpy(float)
        except ValueError as error:
            found.loc[same.index, "unpredicted"] = str(error)
    guessed = setups["workload"].isin(list(model.guessed)) & (found["unpredicted"] == "")
    return found.assign(guessed=guessed).set_index(test.index)


def summary(test: pd.DataFrame, predicted: pd.DataFrame) -> pd.DataFrame:
    """Return errors and interval coverage by workload, by number of instances, and in total.

    `predicted` is the result of `backtest` for the runs `test`. Runs without a prediction are left
    out. The result has a row for each group of runs. Its column `by` is "workload", "instances" or
    "all", and its column `group` is the name of the group. The other columns are
    the number of runs, the errors, and the coverage and width of the 90 % intervals.
    """
    rows = predicted.rename(columns=dict(zip(PREDICTED, STEP, strict=True))).assign(
        measured_s=test["step_s"],
        workload=test["workload"],
        instances=machines(test),
        all="all",
    )
    found = [
        {"by": by, "group": str(group), **scores(scored)}
        for by in ("workload", "instances", "all")
        for group, scored in rows[rows["unpredicted"] == ""].groupby(by)
    ]
    return pd.DataFrame(found)


def notes(data: TrainingData, test: pd.DataFrame, predicted: pd.DataFrame) -> tuple[str, ...]:
    """Return a sentence for each problem of a backtest, with the number of rows that have it.

    The problems are:

    - test rows without a prediction
    - test rows that were predicted without measurements of their workload
    - training rows that were ignored, because their mode or step time is not valid

    `data` is the training data. `predicted` has the predictions of `backtest` for the runs `test`.
    """
    counts = {
        "no prediction": Counter(filter(None, predicted["unpredicted"])),
        "guessed from flops_per_sample alone": Counter(test["workload"][predicted["guessed"]]),
        "TRAIN rows ignored because of their mode or step time": Counter(data.runs["workload"])
        - Counter(valid_runs(data.runs)["workload"]),
    }
    sentences = []
    for what, rows in counts.items():
        named = [f"{name} ({count} rows)" for name, count in rows.most_common(_MOST_NAMED)]
        named += ["others"] if len(rows) > _MOST_NAMED else []
        if named:
            sentences.append(f"{what}: {', '.join(named)}")
    return tuple(sentences)
