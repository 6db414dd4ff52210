"""The step-time model on T4 machines alone: noise floor, unequal layouts, and seconds.

Other splits of these rows are in held_out.py. Predictions are timed through the registered model.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import mlflow
import numpy as np
import pandas as pd
import typer

from models.monitoring.cross_validation import COLUMNS
from models.step_time.dataset import TrainingData
from models.step_time.model import fit
from tasks.training.registry import Provenance, log_challenger, promote
from tasks.workspace.blas_threads import single_thread
from tests.benchmarks.claims import Claim, Write, report, show
from tests.benchmarks.held_out import DATA, training_data
from tests.benchmarks.held_out_groups import T4
from tests.benchmarks.scores import MEASURED, Group, score, summary

_PREDICTIONS, _LARGE, _REPEATS = 10_000, 100_000, 3


def noise_floor(runs: pd.DataFrame) -> pd.Series[float]:
    """Error of a perfect model: rows that differ only in the order of their machines.

    Two such rows differ by d in logs; if both have one spread, each is off by d / sqrt(2).
    """
    order = ["+".join(sorted(str(text).split("+"))) for text in runs["layout"]]
    setup = ["workload", "cluster", "order", "batch_per_device", "accumulation_steps"]
    gaps: list[float] = []
    for _, equal in runs.assign(order=order).groupby(setup):
        logs = np.log(equal["step_s"].to_numpy(float))
        first, second = np.triu_indices(len(logs), 1)
        gaps += list(abs(logs[first] - logs[second]) / np.sqrt(2))
    return pd.Series({"mean": np.mean(gaps), "median": np.median(gaps)})


def grown(runs: pd.DataFrame, count: int) -> pd.DataFrame:
    """`count` rows: copies with a few samples more and a step longer by as much, with noise."""
    places = np.arange(count)
    copies = runs.iloc[places % len(runs)].reset_index(drop=True)
    more = places // len(runs)
    noise = np.exp(np.random.default_rng(0).normal(0, 0.03, count))
    return copies.assign(
        batch_per_device=(copies["batch_per_device"].astype(int) + more).astype(str),
        step_s=copies["step_s"] * (1 + 0.01 * more) * noise,
    )


def seconds(data: TrainingData) -> dict[str, float]:
    """Seconds of fits, and of predictions through MLflow."""
    setups = data.runs.drop(columns=MEASURED)
    repeats = setups.iloc[np.arange(_PREDICTIONS) % len(setups)].reset_index(drop=True)
    large = replace(data, runs=grown(data.runs, _LARGE))
    found = {
        f"fit of {len(data.runs):,} rows": _timed(lambda: fit(data, seed=0)),
        f"fit of {_LARGE:,} rows": _timed(lambda: fit(large, seed=0)),
    }
    with tempfile.TemporaryDirectory(prefix="srift-speed-") as folder:
        model, home = fit(data, seed=0), Path(folder)
        provenance = Provenance(
            training_digest="speed",
            training_rows=len(data.runs),
            code_commit="",
            seed=0,
            refresh_id="speed",
        )
        version = log_challenger(
            home,
            "ec2",
            model,
            scoreboard=pd.DataFrame(columns=COLUMNS),
            card="speed",
            provenance=provenance,
        )
        promote(home, "ec2", version, "speed")
        served = mlflow.pyfunc.load_model("models:/srift-step-time-ec2@champion")
        for rows in (setups.iloc[:1], repeats):
            served.predict(rows)
            best = min(_timed(partial(served.predict, rows)) for _ in range(_REPEATS))
            found[f"predictions: {len(rows):,}"] = best
    return found


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(
    folder: Annotated[Path, typer.Option(help="Where the measured data are.")] = DATA,
    write: Write = False,
) -> None:
    """Print the noise floor, the error on unequal layouts, and seconds."""
    data = training_data(folder)
    data = replace(data, runs=data.runs[data.runs["kind"] == T4].reset_index(drop=True))
    even = data.runs["even"].to_numpy(bool)
    with single_thread():
        group = Group(
            table="unequal layouts, never measured", name="all", known=even, held_out=~even
        )
        row = summary(score(data, group)).iloc[0]
        took = seconds(data)
    floor = noise_floor(data.runs)
    show("seconds", pd.DataFrame([took]))
    limits = {f"fit of {_LARGE:,} rows": 30.0, "predictions: 1": 0.02}
    limits |= {f"predictions: {_PREDICTIONS:,}": 0.5}
    error, middle = row["mean"], row["median"]
    result = f"{error:.1f} / {middle:.1f} %; floor {100 * floor['mean']:.1f} %"
    claims = [Claim(group.table, "5 / 3.5 %", result, bool(error <= 5 and middle <= 3.5))]
    for what, spent in took.items():
        limit = limits.get(what, 10.0)
        claims.append(Claim(what, f"{limit:g} s", f"{spent:.3g} s", spent <= limit))
    report("models", claims, write=write)


if __name__ == "__main__":
    typer.run(main)
