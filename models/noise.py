"""How far apart runs of one setup are: the floor under every error that a prediction of it can have."""

from __future__ import annotations

import pandas as pd

SETUP = ["workload", "cluster", "batch_per_device", "accumulation_steps"]


def spreads(runs: pd.DataFrame) -> pd.DataFrame:
    """Mean absolute deviation from the setup's median, relative: one row a setup and one for all.

    `run_id` is TRIAL-LAUNCH-ITEM. `in_launch`: runs from their launch's median; `between_launches`: launch medians
    from their trial's; `between_trials`: trial medians from the median over trials (NaN with one trial).
    """
    parts = runs["run_id"].str.rsplit("-", n=2, expand=True)
    rows = runs.assign(trial=parts[0], launch=parts[0] + "-" + parts[1])
    found = []
    for setup, own in rows.groupby(SETUP, sort=True):
        launches = own.groupby(["trial", "launch"])["step_s"].median()
        trials = launches.groupby("trial").median()
        found.append(
            {
                **dict(zip(SETUP, setup, strict=True)),
                "runs": len(own),
                "median_s": float(own["step_s"].median()),
                "in_launch": _deviation(own.groupby("launch")["step_s"].transform("median"), own["step_s"]),
                "between_launches": _deviation(launches.groupby("trial").transform("median"), launches),
                "between_trials": _deviation(trials.median(), trials) if len(trials) > 1 else float("nan"),
            }
        )
    table = pd.DataFrame(found)
    figures = ["in_launch", "between_launches", "between_trials"]
    return pd.concat([table, pd.DataFrame([{"workload": "all", **table[figures].mean()}])], ignore_index=True)


def between(before: pd.DataFrame, after: pd.DataFrame) -> pd.DataFrame:
    """Setups that two campaigns share: how far the second's medians are from the first's, relative. One row.

    `ratio` is the median of after / before; the others are of |after / before - 1|. NaN where they share none.
    """
    first, second = (runs.groupby(SETUP)["step_s"].median() for runs in (before, after))
    ratio = (second / first).dropna()
    away = (ratio - 1.0).abs()
    figures = {"ratio": ratio.median(), "median": away.median(), "mean": away.mean(), "p90": away.quantile(0.9)}
    return pd.DataFrame([{"setups": len(ratio), **figures}])


def _deviation(middle: pd.Series[float] | float, values: pd.Series[float]) -> float:
    return float((values / middle - 1.0).abs().mean())
