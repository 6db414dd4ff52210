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
    news = ", ".join(sorted(now - before, reverse=True)) if now > before else ""
    if not any(name.startswith("workload") for name in before):
        return decide(scored, None, news=news)
    rival = predictions_of(champion, data)
    fresh = rival[~rival["run_id"].isin(champion.trained_on) & rival["row"].isin(scored["row"])]
    if news or len(fresh) >= _FRESH_ROWS:
        rival = fresh if len(fresh) >= _FRESH_ROWS else rival.iloc[:0]
    return decide(scored, rival, news=news)


def decide(challenger: pd.DataFrame, champion: pd.DataFrame | None, *, news: str = "") -> Promotion:
    """Apply the rule to held-out rows of the challenger and `predictions_of` the champion.

    Refuse if the challenger's 90 % intervals cover less than 80 % of 20 rows or more. Else promote
    if there is no champion, or if the mean error on runs of both is lower by more than noise: the
    5 % quantile of a bootstrap over setups is above 0. With `news`, workloads and instance types
    that only the challenger knows, it must not be worse by more than noise.
    """
    board = summarise(challenger)
    short = _coverage_short(board)
    more = f"it knows {news}" if news else ""
    if champion is None:
        error = f"mean error {_mean_error(board):.1%}" if len(board) else "not judged"
        return _promotion(True, more or "no champion", error, short)
    if short or not len(board):
        return _promotion(False, short or "no held-out row to judge by")
    pairs = pd.DataFrame({"now": _errors(challenger), "before": _errors(champion)}).dropna()
    if not len(pairs):
        return _promotion(bool(news), more or "no run to compare challenger and champion on")
    setup = challenger.groupby("row")["setup"].first()
    low, high, setups = _noise(pairs["before"] - pairs["now"], setup)
    better = setups >= _FEWEST_SETUPS and low > 0
    now, before = pairs["now"].mean(), pairs["before"].mean()
    numbers = f"mean error {now:.1%}, champion {before:.1%} on {len(pairs)} runs of {setups} setups"
    margin = "by more than noise" if better else "not by more than noise"
    return _promotion(better or bool(news and high >= 0), more, numbers, margin)


def _promotion(promote: bool, *because: str) -> Promotion:
    word = "Promoted" if promote else "Refused"
    return Promotion(promote=promote, reason=f"{word}: {'; '.join(filter(None, because))}.")


def caution(scoreboard: pd.DataFrame) -> str:
    """Return the warning that the model's answers carry; empty where none is due."""
    if not len(scoreboard):
        return "nothing could be held out to judge the model"
    error = _mean_error(scoreboard)
    large = f"mean error {error:.1%} on held-out setups" if error > LARGE_ERROR else ""
    return ", ".join(filter(None, [large, _coverage_short(scoreboard)]))


def _mean_error(scoreboard: pd.DataFrame) -> float:
    pooled = scoreboard[scoreboard["group"] == "all"]
    return float(np.average(pooled["mean_error"].to_numpy(float), weights=pooled["rows"]))


def _coverage_short(scoreboard: pd.DataFrame) -> str:
    """Describe the splits whose intervals cover too little; empty where none does."""
    judged = scoreboard[(scoreboard["group"] == "all") & (scoreboard["rows"] >= _ENOUGH_ROWS)]
    return ", ".join(
        f"90 % intervals cover {row['coverage_90']:.1%} of {row['rows']} rows held out by"
        f" {row['split'].replace('_', ' ')}, not {_LEAST_COVERAGE:.0%}"
        for _, row in judged[judged["coverage_90"] < _LEAST_COVERAGE].iterrows()
    )


def _errors(scored: pd.DataFrame) -> pd.Series[float]:
    """Return the relative error of each run, the mean over the splits that hold it out."""
    return (scored["step_s"] / scored["measured_s"] - 1).abs().groupby(scored["row"]).mean()


def _noise(gain: pd.Series[float], setup: pd.Series[str]) -> tuple[float, float, int]:
    """Return 5 % and 95 % quantiles of the mean gain over resampled setups, and their number."""
    sums = gain.groupby(setup.loc[gain.index]).agg(["sum", "size"]).to_numpy(float)
    # a fixed seed: the decision is a function of the predictions
    picked = np.random.default_rng(0).integers(0, len(sums), (2000, len(sums)))
    total, count = sums[picked].sum(axis=1).T
    low, high = np.quantile(total / count, [0.05, 0.95])
    return float(low), float(high), len(sums)
