"""How good is the model on setups it has not seen, and may a challenger replace the champion.

Splits leave whole groups out and fit again without them: a workload's multi-machine rows, a number of instances, a
workload on a cluster. Errors are |predicted - measured| / measured; coverage is of the 90 % interval.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from .cloud import cluster_name, parse_cluster
from .learning import TrainingData, valid_runs
from .step_time import StepTimeModel, fit

SPLITS = ("workload", "cluster_size", "setup")
COLUMNS = ("split", "group", "rows", "mean_error", "median_error", "p90_error", "coverage_90", "median_width")
# Folds of the split by setup; fewest rows that say anything about coverage, and the coverage that they must show.
_FOLDS, _ENOUGH_ROWS, _LEAST_COVERAGE = 5, 20, 0.8
# Fewest rows that a champion has not seen to be judged on them.
_FRESH_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """May the challenger be promoted, and why, in one plain sentence with numbers."""

    promote: bool
    reason: str


def held_out(data: TrainingData, *, seed: int) -> Iterator[tuple[str, str, TrainingData, pd.DataFrame]]:
    """(split, group, training data without the group, the group's rows)."""
    runs = valid_runs(data.runs).reset_index(drop=True)
    if not len(runs):
        return
    types = [parse_cluster(str(one)) for one in runs["cluster"]]
    size = np.array([len(one) for one in types])
    composition = np.array([cluster_name(sorted(one)) for one in types])
    workload = np.array([str(one) for one in runs["workload"]])
    for name in sorted(set(workload)):
        out = (workload == name) & (size > 1)
        yield "workload", name, replace(data, runs=runs[~out]), runs[out]
    for count in sorted(set(size)):
        # the probes of clusters that large go too: nobody measured there
        probes = data.probes
        if "cluster" in probes and count > 1:
            probes = probes[[len(parse_cluster(str(one))) != count for one in probes["cluster"]]]
        yield "cluster_size", str(count), replace(data, runs=runs[size != count], probes=probes), runs[size == count]
    groups = np.array([f"{one} on {two}" for one, two in zip(workload, composition, strict=True)])
    names = sorted(set(groups))
    order = np.random.default_rng(seed).permutation(len(names))
    folds = {name: int(at) % _FOLDS for name, at in zip(names, order, strict=True)}
    fold = np.array([folds[name] for name in groups])
    for at in sorted(set(fold)):
        yield "setup", f"fold {at}", replace(data, runs=runs[fold != at]), runs[fold == at]


def predictions(data: TrainingData, *, seed: int, only: Collection[str] | None = None) -> pd.DataFrame:
    """Each held-out row with its split, group, measured step_s and what a model that never saw it predicts.

    `only` keeps the rows of these run ids. Columns: split, group, run_id, measured_s, step_s, step_low_s, step_high_s.
    """
    found: list[pd.DataFrame] = []
    for split, group, training, rows in held_out(data, seed=seed):
        chosen = rows if only is None else rows[[str(one) in only for one in rows["run_id"]]]
        if not len(chosen):
            continue
        try:
            model = fit(training, seed=seed)
            predicted = model.predict(chosen.drop(columns=["step_s", "sync_s"], errors="ignore"))
        except ValueError:  # a group whose workload nothing else tells about cannot be held out
            continue
        found.append(_scored(split, group, chosen, predicted))
    return pd.concat(found, ignore_index=True) if found else _nothing()


def _scored(split: str, group: str, rows: pd.DataFrame, predicted: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "split": split,
            "group": group,
            "run_id": rows["run_id"].astype(str) if "run_id" in rows else "",
            "measured_s": rows["step_s"].astype(float),
            "step_s": predicted["step_s"],
            "step_low_s": predicted["step_low_s"],
            "step_high_s": predicted["step_high_s"],
        }
    )


def _nothing() -> pd.DataFrame:
    names = ["split", "group", "run_id", "measured_s", "step_s", "step_low_s", "step_high_s"]
    return pd.DataFrame({name: pd.Series(dtype=object if at < 3 else float) for at, name in enumerate(names)})


def summarise(scored: pd.DataFrame) -> pd.DataFrame:
    """The scoreboard of `predictions`: a row a group, and the group "all" that pools each split."""
    rows: list[dict[str, object]] = []
    for split in SPLITS:
        own = scored[scored["split"] == split]
        groups = [(str(name), part) for name, part in own.groupby("group", sort=True)]
        for name, part in [*groups, ("all", own)]:
            if len(part):
                rows.append({"split": split, "group": name, **_numbers(part)})
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _numbers(part: pd.DataFrame) -> dict[str, float | int]:
    measured, step = part["measured_s"].to_numpy(float), part["step_s"].to_numpy(float)
    low, high = part["step_low_s"].to_numpy(float), part["step_high_s"].to_numpy(float)
    error = np.abs(step / measured - 1)
    return {
        "rows": len(part),
        "mean_error": float(error.mean()),
        "median_error": float(np.median(error)),
        "p90_error": float(np.quantile(error, 0.9)),
        "coverage_90": float(np.mean((low <= measured) & (measured <= high))),
        "median_width": float(np.median((high - low) / step)),
    }


def scoreboard(data: TrainingData, *, seed: int, only: Collection[str] | None = None) -> pd.DataFrame:
    """Errors on setups never seen: one row a split and group, fitted again without the group. Errors as parts of one.

    Columns as in COLUMNS; `median_width` is (high - low) / predicted. `only` scores the rows of these run ids alone.
    """
    return summarise(predictions(data, seed=seed, only=only))


def scoreboard_of(
    model: StepTimeModel, data: TrainingData, *, seed: int, only: Collection[str] | None = None
) -> pd.DataFrame:
    """The same groups and rows, as the fixed `model` predicts them (rows it was trained on flatter it)."""
    found: list[pd.DataFrame] = []
    for split, group, _, rows in held_out(data, seed=seed):
        chosen = rows if only is None else rows[[str(one) in only for one in rows["run_id"]]]
        chosen = chosen[[str(one) in model.workloads for one in chosen["workload"]]]
        known = set(model.instance_types)
        chosen = chosen[[known.issuperset(parse_cluster(str(one))) for one in chosen["cluster"]]]
        if len(chosen):
            features = chosen.drop(columns=["step_s", "sync_s"], errors="ignore")
            found.append(_scored(split, group, chosen, model.predict(features)))
    return summarise(pd.concat(found, ignore_index=True) if found else _nothing())


def contest(data: TrainingData, champion: StepTimeModel, *, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(challenger's, champion's) scoreboards on the same rows: those that the champion has not seen, if 8 or more.

    With fewer, all rows are compared: the champion then has the advantage of having seen them, and usually stays.
    """
    known = set(champion.trained_on)
    fresh = {str(one) for one in valid_runs(data.runs).get("run_id", pd.Series(dtype=object))} - known
    only = fresh if len(fresh) >= _FRESH_ROWS else None
    return scoreboard(data, seed=seed, only=only), scoreboard_of(champion, data, seed=seed, only=only)


def _coverage_short(own: pd.DataFrame) -> str:
    """Which pooled split's intervals cover too little to be believed; empty where none does."""
    for split, row in own.iterrows():
        if row["rows"] >= _ENOUGH_ROWS and row["coverage_90"] < _LEAST_COVERAGE:
            by = str(split).replace("_", " ")
            return f"90 % intervals cover only {row['coverage_90']:.0%} of {int(row['rows'])} rows held out by {by}"
    return ""


def decide(challenger: pd.DataFrame, champion: pd.DataFrame | None) -> Decision:
    """The promotion rule. Both scoreboards must be of the same rows of today; None where there is no champion.

    Refused where the challenger's 90 % intervals cover less than 80 % of enough rows; else promoted if no champion
    exists, or if its mean error over held-out groups is lower by more than noise: the paired differences, weighted by
    rows, have a bootstrap 5 % quantile above zero.
    """
    own = challenger[challenger["group"] == "all"].set_index("split")
    if not len(own):
        if champion is None:
            return Decision(promote=True, reason="Promoted: there is no champion, and no held-out row to judge by yet.")
        return Decision(promote=False, reason="Refused: no held-out row to judge the challenger by.")
    short = _coverage_short(own)
    rows = own["rows"].to_numpy(float)
    error = float(np.average(own["mean_error"].to_numpy(float), weights=rows))
    if champion is None:
        caveat = f", although {short}" if short else ""
        reason = f"Promoted: there is no champion; mean error {error:.1%} on setups held out{caveat}."
        return Decision(promote=True, reason=reason)
    if short:
        return Decision(promote=False, reason=f"Refused: {short}; at least {_LEAST_COVERAGE:.0%} is asked.")
    keys = ["split", "group"]
    pairs = challenger.merge(champion, on=keys, suffixes=("", "_champion"))
    pairs = pairs[(pairs["group"] != "all") & (pairs["rows"] == pairs["rows_champion"])]
    if not len(pairs):
        return Decision(promote=False, reason="Refused: challenger and champion share no held-out group of equal rows.")
    gain = (pairs["mean_error_champion"] - pairs["mean_error"]).to_numpy(float)
    weights = pairs["rows"].to_numpy(float)
    mean = float(np.average(gain, weights=weights))
    # a fixed seed: the decision is a function of the two scoreboards
    picked = np.random.default_rng(0).integers(0, len(gain), (2000, len(gain)))
    resampled = (gain[picked] * weights[picked]).sum(axis=1) / weights[picked].sum(axis=1)
    low = float(np.quantile(resampled, 0.05))
    before = float(np.average(pairs["mean_error_champion"].to_numpy(float), weights=weights))
    now = float(np.average(pairs["mean_error"].to_numpy(float), weights=weights))
    numbers = (
        f"mean error {now:.1%} against the champion's {before:.1%} over {len(pairs)} held-out groups "
        f"({int(weights.sum())} predictions)"
    )
    if len(gain) >= 3 and low > 0:
        return Decision(promote=True, reason=f"Promoted: {numbers}; better by more than noise.")
    why = "not better" if mean <= 0 else "better by less than noise"
    return Decision(promote=False, reason=f"Refused: {numbers}; {why}.")
