"""May a challenger replace the champion: better by more than noise where both predict, and intervals that cover."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..step_time.dataset import TrainingData
from ..step_time.model import StepTimeModel
from .cross_validation import known_of, predictions_of, summarise

# Fewest rows that say anything about coverage, and the coverage that they must show.
_ENOUGH_ROWS, _LEAST_COVERAGE = 20, 0.8
# Mean error on setups held out beyond which whoever reads the model's answers is warned.
LARGE_ERROR = 0.25
# Fewest rows that a champion has not seen to be judged on them.
_FRESH_ROWS = 8
# Fewest setups whose differences tell better from noise.
_FEWEST_SETUPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """May the challenger be promoted, and why, in one plain sentence with numbers."""

    promote: bool
    reason: str


def verdict(
    data: TrainingData,
    scored: pd.DataFrame,
    challenger: StepTimeModel,
    champion: StepTimeModel | None,
) -> Decision:
    """May the challenger, whose held-out rows are `scored`, replace the champion.

    They are compared on the runs that both can predict: those that the champion has not seen, if 8 or more. With fewer,
    all of them: the champion then has the advantage of having seen them, and stays, unless the challenger has met more
    workloads or instance types, which such a comparison may not outweigh. A champion that has met no workload as it is
    defined now counts as absent.
    """
    if champion is None:
        return decide(scored, None)
    before, now = known_of(champion, data), known_of(challenger, data)
    news = (
        ", ".join(f"{what} {name}" for what, name in sorted(now - before, reverse=True))
        if now > before
        else ""
    )
    if not any(what == "workload" for what, _ in before):
        return decide(scored, None, news=news)
    rival = predictions_of(champion, data)
    fresh = rival[~rival["run_id"].isin(champion.trained_on) & rival["row"].isin(scored["row"])]
    if len(fresh) >= _FRESH_ROWS or news:
        rival = fresh if len(fresh) >= _FRESH_ROWS else rival.iloc[:0]
    return decide(scored, rival, news=news)


def caution(scoreboard: pd.DataFrame) -> str:
    """What a reader of the model's answers is to know of its `scoreboard`; empty where nothing is beyond a bound.

    The bounds: LARGE_ERROR for the mean error on setups held out, and the coverage that a promotion asks for.
    """
    if not len(scoreboard):
        return "nothing could be held out to judge it by"
    own = scoreboard[scoreboard["group"] == "all"].set_index("split")
    error = _mean_error(own)
    large = f"mean error {error:.1%} on setups held out" if error > LARGE_ERROR else ""
    return ", ".join(filter(None, [large, _coverage_short(own)]))


def _mean_error(own: pd.DataFrame) -> float:
    """Of the pooled splits, each by its rows."""
    return float(np.average(own["mean_error"].to_numpy(float), weights=own["rows"].to_numpy(float)))


def _coverage_short(own: pd.DataFrame) -> str:
    """Which pooled split's intervals cover too little to be believed; empty where none does."""
    for split, row in own.iterrows():
        if row["rows"] >= _ENOUGH_ROWS and row["coverage_90"] < _LEAST_COVERAGE:
            by = str(split).replace("_", " ")
            return f"90 % intervals cover only {row['coverage_90']:.0%} of {int(row['rows'])} rows held out by {by}"
    return ""


def decide(challenger: pd.DataFrame, champion: pd.DataFrame | None, *, news: str = "") -> Decision:
    """The promotion rule, on held-out rows of the challenger and `predictions_of` the champion (None: none).

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
            return Decision(
                promote=True, reason=f"Promoted: {because}, and no held-out row to judge by yet."
            )
        return Decision(
            promote=False, reason="Refused: no held-out row to judge the challenger by."
        )
    short = _coverage_short(own)
    if champion is None:
        error = _mean_error(own)
        caveat = f", although {short}" if short else ""
        because = more or "there is no champion"
        return Decision(
            promote=True,
            reason=f"Promoted: {because}; mean error {error:.1%} on setups held out{caveat}.",
        )
    if short:
        return Decision(
            promote=False, reason=f"Refused: {short}; at least {_LEAST_COVERAGE:.0%} is asked."
        )
    pairs = pd.DataFrame({"now": _errors(challenger), "before": _errors(champion)}).dropna()
    if not len(pairs):
        if more:
            return Decision(
                promote=True,
                reason=f"Promoted: {more}; too few runs are new to both to compare them on.",
            )
        return Decision(
            promote=False, reason="Refused: challenger and champion share no run to be compared on."
        )
    low, high, setups = _noise(
        pairs["before"] - pairs["now"], challenger.groupby("row")["setup"].first()
    )
    numbers = (
        f"mean error {pairs['now'].mean():.1%} against the champion's {pairs['before'].mean():.1%} on {len(pairs)} "
        f"runs of {setups} workloads on clusters"
    )
    if setups >= _FEWEST_SETUPS and low > 0:
        return Decision(promote=True, reason=f"Promoted: {numbers}; better by more than noise.")
    if more and high >= 0:
        return Decision(
            promote=True, reason=f"Promoted: {more}; {numbers}, not worse by more than noise."
        )
    why = (
        "not better"
        if pairs["now"].mean() >= pairs["before"].mean()
        else "better by less than noise"
    )
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
