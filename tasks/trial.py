"""Runs made to judge Srift itself: measure given setups, and say what the champion and two baselines had expected.

Used by the flows `holdout`, `noise` and `advice`. What they measure is stored like any other run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd

from models.alarm import TAKEN
from models.campaign import Launch, Wanted
from models.cloud import Cluster, parse_cluster, parse_numbers
from models.judging.baselines import predict_compute_only
from models.judging.holdout import Key, Unseen, key
from models.learning import TrainingData
from models.step_time import StepTimeModel
from warehouse.reads import mart

from .collect import bring_home
from .installation import Installation
from .report import reporter
from .serve import serve_launch
from .tally import Tally
from .trees import predict_trees

ITEM_S = 9.0  # at most, of one run: what a launch's deadline is reckoned by
START_S = 25.0


def launch_of(cluster: Cluster, items: Iterable[Unseen], reason: str) -> Launch:
    """A launch that measures exactly `items`, in order; the same setup may stand there more than once."""
    wanted = tuple(
        Wanted(
            kind="train",
            workload=item.workload,
            nodes=item.nodes,
            batches=item.batches,
            accumulation_steps=item.accumulation_steps,
            message_bytes=(),
            reason=reason,
            est_s=ITEM_S,
        )
        for item in items
    )
    est_s = START_S + ITEM_S * len(wanted)
    return Launch(
        cluster=cluster,
        items=wanted,
        est_s=est_s,
        est_usd=(cluster.usd_per_hour or 0.0) * est_s / 3600.0,
        reason=reason,
    )


def measure_all(here: Installation, launches: Sequence[Launch], trial_id: str) -> pd.DataFrame:
    """Serve `launches` and return their measured runs (the mart's columns and taken_share), in order of run id."""
    # twice: what a host disturbs is measured again
    tally = Tally(cap_usd=float("inf"), stop_at=time.monotonic() + 2 * sum(one.est_s for one in launches))
    reporter().start(sum(len(launch.items) for launch in launches))
    for number, launch in enumerate(launches):
        served = serve_launch.fn(here, launch, f"{trial_id}-{number:02d}", tally)
        tally.add(served, bring_home.fn(here, served, trial_id, datetime.now(UTC)), load_s=0.0)
        reporter().say(f"  {launch.cluster.name}: {len(served.recorded)} of {len(launch.items)} runs, {served.outcome}")
    reporter().stop()
    runs = mart(here.warehouse, "runs", provider=here.provider.name)
    details = mart(here.warehouse, "run_details", provider=here.provider.name)[["run_id", "taken_share"]]
    own = runs[runs["run_id"].str.startswith(trial_id)].merge(details, on="run_id", how="left")
    return own.sort_values("run_id").reset_index(drop=True)


def keys_of(runs: pd.DataFrame) -> set[Key]:
    """What has been measured, as the seeded rule of `models.judging.holdout` knows setups."""
    found = set()
    for row in runs.itertuples():
        types = parse_cluster(str(row.cluster))
        batches = parse_numbers(str(row.batch_per_device), len(types), "batch_per_device")
        found.add(key(str(row.workload), types, batches))
    return found


Predict = Callable[[pd.DataFrame], np.ndarray[tuple[int, ...], np.dtype[np.float64]]]


def compare(model: StepTimeModel, data: TrainingData, measured: pd.DataFrame) -> pd.DataFrame:
    """`measured` with the champion's prediction and interval, and both baselines fitted on the same training data."""
    setups = measured.drop(columns=["step_s", "sync_s", "step_spread", "taken_share"], errors="ignore")
    predicted = model.predict(setups)
    return measured.assign(
        predicted_step_s=predicted["step_s"].to_numpy(),
        low_s=predicted["step_low_s"].to_numpy(),
        high_s=predicted["step_high_s"].to_numpy(),
        compute_only_s=predict_compute_only(data, setups),
        trees_s=predict_trees(data, setups),
    )


def summary(compared: pd.DataFrame) -> pd.DataFrame:
    """Relative errors of the champion and the baselines, the champion's by kind of setup too; coverage and median width
    of its intervals. Undisturbed are runs of whose processor time less than a tenth was taken away (node/patience.py).
    """
    mixed = compared["cluster"].str.contains("+", regex=False)
    rows = [_scored("champion", "predicted_step_s", compared)]
    for name, own in (
        ("of one type", ~mixed),
        ("mixed types", mixed),
        ("undisturbed", compared["taken_share"] < TAKEN),
    ):
        if own.any() and not own.all():
            rows.append(_scored(f"  {name}", "predicted_step_s", compared[own]))
    rows += [_scored("compute only", "compute_only_s", compared), _scored("boosted trees", "trees_s", compared)]
    return pd.DataFrame(rows)


def _scored(name: str, column: str, compared: pd.DataFrame) -> dict[str, Any]:
    measured = compared["step_s"]
    error = np.abs(compared[column].to_numpy(float) / measured.to_numpy(float) - 1.0)
    row = {
        "model": name,
        "rows": len(error),
        "mean": error.mean(),
        "median": np.median(error),
        "p90": np.quantile(error, 0.9),
        "worst": error.max(),
    }
    if column != "predicted_step_s":
        return row
    covered = (compared["low_s"] <= measured) & (measured <= compared["high_s"])
    width = (compared["high_s"] - compared["low_s"]) / compared["predicted_step_s"]
    return row | {"coverage_90": covered.mean(), "median_width": width.median()}
