"""The promotion rule: a challenger must be better by more than noise, with intervals that cover."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..step_time.dataset import TrainingData
from ..step_time.model import StepTimeModel
from .cross_validation import known_of, predictions_of, summarise

_ENOUGH_ROWS, _LEAST_COVERAGE = 20, 0.8
# Mean error on held-out setups from which answers carry a warning.
LARGE_ERROR = 0.25
_FRESH_ROWS = 8  # runs that are new to the champion, to judge it on them
_FEWEST_SETUPS = 3  # whose differences distinguish better from noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """May the challenger be promoted, and the reason."""

    promote: bool
    reason: str


def verdict(
    data: TrainingData,
    scored: pd.DataFrame,
    challenger: StepTimeModel,
    champion: StepTimeModel | None,
) -> Promotion:
    """Decide by `scored`, the challenger's held-out rows, and the champion's predictions.

    Both are compared on runs that are new to the champion, if there are 8. With fewer, all runs
    count, which favours the champion; they do not count if the challenger knows more workloads or
    instance types. A champion without any workload as it is defined now counts as absent.
    """
    if champion is None:
        return decide(scored, None)
    before, now = known_of(champion, data), known_of(challenger, data)
    news = ""
    if now > before:
        news = ", ".join(f"{what} {name}" for what, name in sorted(now - before, reverse=True))
    if not any(what == "workload" for what, _ in before):
        return decide(scored, None, news=news)
    rival = predictions_of(champion, data)
    fresh = rival[~rival["run_id"].isin(champion.trained_on) & rival["row"].isin(scored["row"])]
    if len(fresh) >= _FRESH_ROWS:
        rival = fresh
    elif news:
        rival = rival.iloc[:0]
    return decide(scored, rival, news=news)


def caution(scoreboard: pd.DataFrame) -> str:
    """Return the warning that the model's answers carry; empty where none is due."""
    if not len(scoreboard):
        return "nothing could be held out to judge the model"
    pooled = scoreboard[scoreboard["group"] == "all"]
    error = _mean_error(pooled)
    large = f"mean error {error:.1%} on held-out setups" if error > LARGE_ERROR else ""
    return ", ".join(filter(None, [large, _coverage_short(pooled)]))


def _mean_error(pooled: pd.DataFrame) -> float:
    return float(np.average(pooled["mean_error"].to_numpy(float), weights=pooled["rows"]))


def _coverage_short(pooled: pd.DataFrame) -> str:
    """Describe the first split whose intervals cover too little; empty where none does."""
    short = pooled[(pooled["rows"] >= _ENOUGH_ROWS) & (pooled["coverage_90"] < _LEAST_COVERAGE)]
    for _, row in short.iterrows():
        return (
            f"90 % intervals cover {row['coverage_90']:.0%} of {row['rows']} rows held out by"
            f" {row['split'].replace('_', ' ')}"
        )
    return ""


def decide(challenger: pd.DataFrame, champion: pd.DataFrame | None, *, news: str = "") -> Promotion:
    """Apply the rule to held-out rows of the challenger and `predictions_of` the champion.

    Refuse if the challenger's 90 % intervals cover less than 80 % of 20 rows or more. Else promote
    if there is no champion, or if the mean error on runs of both is lower by more than noise: the
    5 % quantile of a bootstrap over setups is above 0. With `news`, workloads and instance types
    that only the challenger knows, it must not be worse by more than noise.
    """
    pooled = summarise(challenger)
    pooled = pooled[pooled["group"] == "all"]
    more = f"it knows {news}" if news else ""
    short = _coverage_short(pooled)
    if champion is None:
        error = f"mean error {_mean_error(pooled):.1%}" if len(pooled) else "not judged"
        because = "; ".join(filter(None, [more or "no champion", error, short]))
        return Promotion(promote=True, reason=f"Promoted: {because}.")
    if not len(pooled):
        return Promotion(promote=False, reason="Refused: no held-out row to judge by.")
    if short:
        return Promotion(promote=False, reason=f"Refused: {short}, not {_LEAST_COVERAGE:.0%}.")
    pairs = pd.DataFrame({"now": _errors(challenger), "before": _errors(champion)}).dropna()
    if not len(pairs):
        because = more or "no run to compare challenger and champion on"
        return Promotion(promote=bool(more), reason=f"{_WORD[bool(more)]}: {because}.")
    setup = challenger.groupby("row")["setup"].first()
    low, high, setups = _noise(pairs["before"] - pairs["now"], setup)
    better = setups >= _FEWEST_SETUPS and low > 0
    promote = better or bool(more and high >= 0)
    numbers = (
        f"mean error {pairs['now'].mean():.1%}, champion {pairs['before'].mean():.1%}"
        f" on {len(pairs)} runs of {setups} setups"
    )
    margin = "by more than noise" if better else "not by more than noise"
    because = "; ".join(filter(None, [more, numbers, margin]))
    return Promotion(promote=promote, reason=f"{_WORD[promote]}: {because}.")


_WORD = {True: "Promoted", False: "Refused"}


def _errors(scored: pd.DataFrame) -> pd.Series[float]:
    """Return the relative error of each run, the mean over the splits that hold it out."""
    return (scored["step_s"] / scored["measured_s"] - 1).abs().groupby(scored["row"]).mean()


def _noise(gain: pd.Series[float], setup: pd.Series[str]) -> tuple[float, float, int]:
    """Return 5 % and 95 % quantiles of the mean gain over resampled setups, and their number."""
    grouped = gain.groupby(setup.loc[gain.index])
    total, count = grouped.sum().to_numpy(float), grouped.size().to_numpy(float)
    # a fixed seed: the decision is a function of the predictions
    picked = np.random.default_rng(0).integers(0, len(total), (2000, len(total)))
    low, high = np.quantile(total[picked].sum(axis=1) / count[picked].sum(axis=1), [0.05, 0.95])
    return float(low), float(high), len(total)
