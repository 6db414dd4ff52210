"""How good is the model on setups it has not seen, and may a challenger replace the champion.

Splits leave whole groups out and fit again without them: a workload's multi-machine rows, a number of instances, a
workload on a cluster. Errors are |predicted - measured| / measured; coverage is of the 90 % interval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import ndtri

from .cloud import cluster_name, parse_cluster
from .learning import TrainingData, definition_digests, valid_runs
from .setups import column
from .step_time import StepTimeModel, fit

SPLITS = ("workload", "cluster_size", "setup")
LEVELS = (0.5, 0.8, 0.9)  # of the intervals in `calibration`
COLUMNS = ("split", "group", "rows", "mean_error", "median_error", "p90_error", "coverage_90", "median_width")
# Folds of the split by setup; fewest rows that say anything about coverage, and the coverage that they must show.
_FOLDS, _ENOUGH_ROWS, _LEAST_COVERAGE = 5, 20, 0.8
# Fewest rows that a champion has not seen to be judged on them.
_FRESH_ROWS = 8
# Fewest setups whose differences tell better from noise.
_FEWEST_SETUPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """May the challenger be promoted, and why, in one plain sentence with numbers."""

    promote: bool
    reason: str


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


def predictions(data: TrainingData, *, seed: int, each: Each = map) -> pd.DataFrame:
    """Each held-out row with its split, group, measured step_s and what a model that never saw it predicts.

    Columns: split, group, row (place among the valid runs: the same in every split), run_id, setup (workload on
    sorted cluster), measured_s, step_s, step_low_s, step_high_s. `each` fits without each group in turn.
    """
    return _together(each(partial(_predicted, seed=seed), held_out(data, seed=seed)))


def fitted(data: TrainingData, *, seed: int, each: Each = map) -> tuple[StepTimeModel, pd.DataFrame]:
    """The model of all the data and its `predictions`, each fit an item for `each`. Raises ValueError as `fit` does."""
    model, *found = each(partial(_fitted, seed=seed), chain([data], held_out(data, seed=seed)))
    return model, _together(found)


def _fitted(work: TrainingData | HeldOut, *, seed: int) -> StepTimeModel | pd.DataFrame | None:
    return fit(work, seed=seed) if isinstance(work, TrainingData) else _predicted(work, seed=seed)


def _together(found: Iterable[pd.DataFrame | None]) -> pd.DataFrame:
    known = [one for one in found if one is not None]
    return pd.concat(known, ignore_index=True) if known else _nothing()


def _predicted(out: HeldOut, *, seed: int) -> pd.DataFrame | None:
    """None for a group whose workload nothing else tells about: it cannot be held out."""
    split, group, training, rows = out
    try:
        predicted = fit(training, seed=seed).predict(_unanswered(rows))
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
            "setup": [f"{one} on {two}" for one, two in zip(rows["workload"], clusters, strict=True)],
            "measured_s": rows["step_s"].astype(float),
            "step_s": predicted["step_s"],
            "step_low_s": predicted["step_low_s"],
            "step_high_s": predicted["step_high_s"],
        },
        index=rows.index,
    )


def _nothing() -> pd.DataFrame:
    texts, numbers = ("split", "group", "row", "run_id", "setup"), ("measured_s", "step_s", "step_low_s", "step_high_s")
    columns = {name: pd.Series(dtype=object) for name in texts} | {name: pd.Series(dtype=float) for name in numbers}
    return pd.DataFrame(columns)


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


def scoreboard(data: TrainingData, *, seed: int) -> pd.DataFrame:
    """Errors on setups never seen: one row a split and group, fitted again without the group. Errors as parts of one.

    Columns as in COLUMNS; `median_width` is (high - low) / predicted.
    """
    return summarise(predictions(data, seed=seed))


def calibration(scored: pd.DataFrame) -> pd.DataFrame:
    """Stated against observed coverage of `predictions`: split, stated (0.5, 0.8, 0.9), observed (part of one), rows.

    The intervals are central ones of a log-normal whose 90 % is step_low_s to step_high_s.
    """
    rows: list[dict[str, object]] = []
    for split, own in scored.groupby("split", sort=False):
        measured, low, high = (
            np.log(own[name].to_numpy(float)) for name in ("measured_s", "step_low_s", "step_high_s")
        )
        away = np.abs(measured - (low + high) / 2) / ((high - low) / 2)  # in half-widths of 90 %
        for level in LEVELS:
            half = ndtri((1 + level) / 2) / ndtri(0.95)
            told = {"stated": level, "observed": float(np.mean(away <= half)), "rows": len(own)}
            rows.append({"split": split, **told})
    return pd.DataFrame(rows, columns=["split", "stated", "observed", "rows"])


def predictions_of(model: StepTimeModel, data: TrainingData) -> pd.DataFrame:
    """What the fixed `model` predicts for those runs whose workload and instance types it has met as they are now.

    Columns as in `predictions`, with empty split and group (rows that it was trained on flatter it).
    """
    known = known_of(model, data)
    runs = valid_runs(data.runs).reset_index(drop=True)
    mask = [
        known.issuperset({("workload", str(work)), *(("instance type", one) for one in parse_cluster(str(cluster)))})
        for work, cluster in zip(column(runs, "workload", ""), column(runs, "cluster", ""), strict=True)
    ]
    rows = runs.loc[np.array(mask, dtype=bool)]
    return _scored("", "", rows, model.predict(_unanswered(rows))) if len(rows) else _nothing()


def known_of(model: StepTimeModel, data: TrainingData) -> set[tuple[str, str]]:
    """("workload", name) and ("instance type", name) that the model has met with the definitions of `data`."""
    told = (
        ("workload", model.workloads, model.workload_digests, definition_digests(data.workloads, "workload")),
        ("instance type", model.instance_types, model.type_digests, definition_digests(data.instance_types, "name")),
    )
    return {(what, one) for what, names, own, today in told for one in names if own.get(one) == today.get(one)}


def contest(
    data: TrainingData, challenger: StepTimeModel, champion: StepTimeModel | None, *, seed: int
) -> tuple[pd.DataFrame, Decision]:
    """The challenger's scoreboard, and whether it may replace the champion by `verdict`."""
    scored = predictions(data, seed=seed)
    return summarise(scored), verdict(data, scored, challenger, champion)


def verdict(
    data: TrainingData, scored: pd.DataFrame, challenger: StepTimeModel, champion: StepTimeModel | None
) -> Decision:
    """May the challenger, whose held-out `predictions` are `scored`, replace the champion.

    They are compared on the runs that both can predict: those that the champion has not seen, if 8 or more. With fewer,
    all of them: the champion then has the advantage of having seen them, and stays, unless the challenger has met more
    workloads or instance types, which such a comparison may not outweigh. A champion that has met no workload as it is
    defined now counts as absent.
    """
    if champion is None:
        return decide(scored, None)
    before, now = known_of(champion, data), known_of(challenger, data)
    news = ", ".join(f"{what} {name}" for what, name in sorted(now - before, reverse=True)) if now > before else ""
    if not any(what == "workload" for what, _ in before):
        return decide(scored, None, news=news)
    rival = predictions_of(champion, data)
    fresh = rival[~rival["run_id"].isin(champion.trained_on) & rival["row"].isin(scored["row"])]
    if len(fresh) >= _FRESH_ROWS or news:
        rival = fresh if len(fresh) >= _FRESH_ROWS else rival.iloc[:0]
    return decide(scored, rival, news=news)


def _coverage_short(own: pd.DataFrame) -> str:
    """Which pooled split's intervals cover too little to be believed; empty where none does."""
    for split, row in own.iterrows():
        if row["rows"] >= _ENOUGH_ROWS and row["coverage_90"] < _LEAST_COVERAGE:
            by = str(split).replace("_", " ")
            return f"90 % intervals cover only {row['coverage_90']:.0%} of {int(row['rows'])} rows held out by {by}"
    return ""


def decide(challenger: pd.DataFrame, champion: pd.DataFrame | None, *, news: str = "") -> Decision:
    """The promotion rule, on `predictions` of the challenger and `predictions_of` the champion (None: none).

    Refused where the challenger's 90 % intervals cover less than 80 % of enough rows; else promoted if no champion
    exists, or if its mean error on the runs that both predict is lower by more than noise: a bootstrap over setups
    (workload on cluster), with each run counted once however many splits hold it out, has its 5 % quantile above zero.
    With `news`, the workloads and instance types that only the challenger has met, it must only not be worse by more
    than noise.
    """
    pooled = summarise(challenger)
    own = pooled[pooled["group"] == "all"].set_index("split")
    more = f"it has met {news}, which the champion has not" if news else ""
    if not len(own):
        if champion is None:
            because = more or "there is no champion"
            return Decision(promote=True, reason=f"Promoted: {because}, and no held-out row to judge by yet.")
        return Decision(promote=False, reason="Refused: no held-out row to judge the challenger by.")
    short = _coverage_short(own)
    if champion is None:
        error = float(np.average(own["mean_error"].to_numpy(float), weights=own["rows"].to_numpy(float)))
        caveat = f", although {short}" if short else ""
        because = more or "there is no champion"
        return Decision(promote=True, reason=f"Promoted: {because}; mean error {error:.1%} on setups held out{caveat}.")
    if short:
        return Decision(promote=False, reason=f"Refused: {short}; at least {_LEAST_COVERAGE:.0%} is asked.")
    pairs = pd.DataFrame({"now": _errors(challenger), "before": _errors(champion)}).dropna()
    if not len(pairs):
        if more:
            return Decision(promote=True, reason=f"Promoted: {more}; too few runs are new to both to compare them on.")
        return Decision(promote=False, reason="Refused: challenger and champion share no run to be compared on.")
    low, high, setups = _noise(pairs["before"] - pairs["now"], challenger.groupby("row")["setup"].first())
    numbers = (
        f"mean error {pairs['now'].mean():.1%} against the champion's {pairs['before'].mean():.1%} on {len(pairs)} "
        f"runs of {setups} workloads on clusters"
    )
    if setups >= _FEWEST_SETUPS and low > 0:
        return Decision(promote=True, reason=f"Promoted: {numbers}; better by more than noise.")
    if more and high >= 0:
        return Decision(promote=True, reason=f"Promoted: {more}; {numbers}, not worse by more than noise.")
    why = "not better" if pairs["now"].mean() >= pairs["before"].mean() else "better by less than noise"
    return Decision(promote=False, reason=f"Refused: {numbers}; {why}.")


def _errors(scored: pd.DataFrame) -> pd.Series[float]:
    """Relative error of each run, the mean over the splits that hold it out."""
    return (scored["step_s"] / scored["measured_s"] - 1).abs().groupby(scored["row"]).mean()


def _noise(gain: pd.Series[float], setup: pd.Series[str]) -> tuple[float, float, int]:
    """5 % and 95 % quantiles of the mean gain when whole setups are drawn again, and how many setups there are."""
    grouped = gain.groupby(setup.loc[gain.index])
    total, count = grouped.sum().to_numpy(float), grouped.size().to_numpy(float)
    # a fixed seed: the decision is a function of the predictions
    picked = np.random.default_rng(0).integers(0, len(total), (2000, len(total)))
    low, high = np.quantile(total[picked].sum(axis=1) / count[picked].sum(axis=1), [0.05, 0.95])
    return float(low), float(high), len(total)
