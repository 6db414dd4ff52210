"""Decide if a new model (the challenger) replaces the model in use (the champion).

The challenger is promoted by default, so that new measurements influence the next answer. Both
models predict the same runs. The challenger is refused if its errors are significantly larger than
those of the champion. It is also refused if its 90 % intervals cover too few measurements.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from ..step_time.dataset import TrainingData
from ..step_time.model import StepTimeModel
from .cross_validation import known_of, predictions_of, scores, summarise

_ENOUGH_ROWS = 20  # minimum number of rows of a split to judge its coverage
_LEAST_COVERAGE = 0.8  # of 90 % intervals
LARGE_ERROR = 0.25  # above this mean error on held-out setups, answers carry a warning
# If at least this many runs are new to the champion, the models are compared on these runs only.
# Coverage is compared only on at least this many runs.
_FRESH_ROWS = 8
_FEWEST_SETUPS = 3  # minimum number of setups to distinguish a difference from noise


class Promotion(NamedTuple):
    """The decision about a new model, with the reason as a sentence."""

    promote: bool
    reason: str


def verdict(
    data: TrainingData,
    scored: pd.DataFrame,
    challenger: StepTimeModel,
    champion: StepTimeModel | None,
) -> Promotion:
    """Decide if the new model `challenger` replaces the model in use, `champion`.

    The models are compared on the runs that the champion was not trained on. If there are fewer
    than 8 such runs, the models are compared on all runs.

    Args:
        data: one provider's measurements.
        scored: held-out predictions of the challenger (see `fit_and_score`).
        challenger: the newest model.
        champion: the model in use; None if there is none.
    """
    if champion is None:
        return decide(scored, None)
    before, now = known_of(champion, data), known_of(challenger, data)
    news = ", ".join(sorted(now - before, reverse=True))
    rival = predictions_of(champion, data)
    fresh = rival[~rival["run_id"].isin(champion.trained_on) & rival["row"].isin(scored["row"])]
    if len(fresh) >= _FRESH_ROWS:
        return decide(scored, fresh, news=news)
    return decide(predictions_of(challenger, data), rival, news=news)


def decide(challenger: pd.DataFrame, champion: pd.DataFrame | None, *, news: str = "") -> Promotion:
    """Decide if a new model (the challenger) replaces the model in use (the champion).

    The first case that applies decides:

    1. There is no champion: promoted.
    2. The challenger predicts step times that are not finite: refused.
    3. The challenger knows workloads or instance types that the champion lacks (`news`): promoted.
    4. No run is predicted by both models: promoted.
    5. On the runs that both models predict, the challenger's mean error is higher in at least 95 %
       of bootstrap samples: refused. The bootstrap resamples setups and needs at least 3 setups.
    6. On the runs that both models predict, the coverage of the challenger's 90 % intervals is
       below 80 % and below the champion's coverage: refused. This case needs at least 8 runs.
    7. All other cases: promoted.

    Args:
        challenger: a row for each prediction of the challenger, with the measured step time.
        champion: predictions of the champion from `predictions_of`; None if there is no champion.
        news: a text with the workloads and instance types that only the challenger knows.
    """
    if champion is None:
        board = summarise(challenger)
        error = f"mean error {_mean_error(board):.1%}" if len(board) else "error unknown"
        return _promotion(True, "no champion", error, _coverage_short(board))
    if not np.isfinite(challenger["step_s"].astype(float)).all():
        return _promotion(False, "it predicts step times that are not finite")
    more = f"it knows {news}" if news else ""
    pairs = pd.DataFrame({"now": _errors(challenger), "before": _errors(champion)}).dropna()
    if not len(pairs):
        return _promotion(True, more or "no run that both challenger and champion can predict")
    setup = challenger.groupby("row")["setup"].first()
    high, setups = _noise(pairs["before"] - pairs["now"], setup)
    worse = setups >= _FEWEST_SETUPS and high < 0
    covers, covered = (
        scores(rows[rows["row"].isin(pairs.index)])["coverage_90"]
        for rows in (challenger, champion)
    )
    narrow = len(pairs) >= _FRESH_ROWS and covers < min(_LEAST_COVERAGE, covered)
    now, before = pairs["now"].mean(), pairs["before"].mean()
    numbers = f"mean error {now:.1%}, champion {before:.1%} on {len(pairs)} runs of {setups} setups"
    return _promotion(
        bool(news) or not (worse or narrow),
        more,
        numbers,
        "the error is higher by more than noise" if worse else "",
        f"90 % intervals cover {covers:.0%}, champion {covered:.0%}" if narrow else "",
    )


def _promotion(promote: bool, *because: str) -> Promotion:
    word = "Promoted" if promote else "Refused"
    return Promotion(promote, f"{word}: {'; '.join(filter(None, because))}.")


def caution(scoreboard: pd.DataFrame) -> str:
    """Return a warning about the model's errors or intervals, or "" if both are acceptable.

    `scoreboard` has errors and interval coverage of held-out runs (`cross_validation.summarise`).
    If it is empty, the warning says so. The warning is shown with the model's answers.
    """
    if not len(scoreboard):
        return "the model was not tested on held-out runs"
    error = _mean_error(scoreboard)
    large = f"mean error {error:.1%} on held-out setups" if error > LARGE_ERROR else ""
    return ", ".join(filter(None, [large, _coverage_short(scoreboard)]))


def _mean_error(scoreboard: pd.DataFrame) -> float:
    """Return the mean relative error of all held-out rows, over all splits."""
    pooled = scoreboard[scoreboard["group"] == "all"]
    return float(np.average(pooled["mean_error"].to_numpy(float), weights=pooled["rows"]))


def _coverage_short(scoreboard: pd.DataFrame) -> str:
    """Return a warning if the 90 % intervals cover less than 80 % of a split's rows, else ""."""
    judged = scoreboard[(scoreboard["group"] == "all") & (scoreboard["rows"] >= _ENOUGH_ROWS)]
    return ", ".join(
        f"90 % intervals cover {row['coverage_90']:.1%} of {row['rows']} rows held out by"
        f" {row['split'].replace('_', ' ')}, not at least {_LEAST_COVERAGE:.0%}"
        for _, row in judged[judged["coverage_90"] < _LEAST_COVERAGE].iterrows()
    )


def _errors(scored: pd.DataFrame) -> pd.Series[float]:
    """Return the relative error of each run, averaged over all predictions of the run."""
    return (scored["step_s"] / scored["measured_s"] - 1).abs().groupby(scored["row"]).mean()


def _noise(gain: pd.Series[float], setup: pd.Series[str]) -> tuple[float, int]:
    """Return an upper bound of the challenger's mean gain, and the number of setups.

    The bound is the 95 % quantile of the mean gain over bootstrap samples of setups. If the bound
    is below 0, the challenger is significantly worse.

    gain: for each run, the error of the champion minus the error of the challenger.
    setup: for each run, the label of its setup.
    """
    sums = gain.groupby(setup.loc[gain.index]).agg(["sum", "size"]).to_numpy(float)
    # fixed seed: equal predictions must lead to equal decisions
    picked = np.random.default_rng(0).integers(0, len(sums), (2000, len(sums)))
    total, count = sums[picked].sum(axis=1).T
    return float(np.quantile(total / count, 0.95)), len(sums)
