"""Estimate the hours and dollars of the whole job on each setup, as means and as random draws.

    work  = ceil(samples / global batch) x step_s / 3600      hours of training steps
    hours = expected_hours(work)
    usd   = hours x usd_per_hour + download_usd

`expected_hours` adds start-up, checkpoints and interruptions (duration.py). `usd_per_hour` is the
price of the cluster: machines, storage, IP addresses and S3 requests. `download_usd` is the price
of the data that machines download when they start. After an interruption, a new machine downloads
its data again.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from ..domain.numeric import FloatArray, IntArray
from ..domain.optimizer_state import checkpoint_bytes
from ..domain.workload import Setup, Workload
from .duration import Conditions, drawn_hours, expected_hours, interruptions
from .job_conditions import STATED, JobConditions, pools_of

Amounts = Mapping[str, FloatArray]  # with the keys "hours" and "usd"


class JobCosts(NamedTuple):
    """Hours and dollars of a job on every setup.

    The arrays in `expected_by_draw` and `drawn` have the shape (setups, draws). All other arrays
    have the shape (setups,).

    - `predictions` has the predicted step time of each setup.
    - `conditions` has the start-up, checkpoint and interruption parameters of each setup.
    - `usd_per_hour` is the price of the whole cluster, or NaN if a price is unknown.
    - `download_usd` is the expected price of all data that the machines download.
    - `expected` has expected hours and dollars.
    - `expected_by_draw` has hours and dollars of a job for each drawn step time. Start-up,
      checkpoints and interruptions are not drawn: their expected effect is added.
    - `drawn` has hours and dollars of a job for drawn step times, start-up, checkpoints and
      interruptions.
    - `interruptions` is the expected number of interruptions.
    - `interruption_risk` is the chance of at least one interruption.
    - `cluster` has a number for each setup. Setups with the same machines, markets and zones have
      the same number.
    """

    setups: Sequence[Setup]
    predictions: pd.DataFrame
    conditions: Conditions
    usd_per_hour: FloatArray
    download_usd: FloatArray
    expected: Amounts
    expected_by_draw: Amounts
    drawn: Amounts
    interruptions: FloatArray
    interruption_risk: FloatArray
    cluster: IntArray


def job_costs(
    workload: Workload,
    setups: Sequence[Setup],
    predictions: pd.DataFrame,
    step_draws: FloatArray,
    *,
    job_conditions: JobConditions = STATED,
    seed: int = 0,
) -> JobCosts:
    """Return hours and dollars of `workload` on each of `setups`.

    Args:
        workload: the job.
        setups: the setups to compare.
        predictions: predicted step times (StepTimeModel.predict), with a row for each setup.
        step_draws: (setups, draws) step seconds. A column is one joint draw for all setups.
        job_conditions: start-up, checkpoint and interruption models. The default needs no
            measurements: it has published interruption rates and prior durations.
        seed: the seed of the draws of start-up, checkpoints and interruptions.
    """
    step_hours = np.array([-(-workload.samples // setup.global_batch) / 3600 for setup in setups])
    work_hours = predictions["step_s"].to_numpy(float) * step_hours
    work_by_draw = step_draws * step_hours[:, None]
    compile_s = [job_conditions.compile_s(workload.name, setup.mode) for setup in setups]
    state_bytes = checkpoint_bytes(workload.gradient_bytes, workload.checkpoint_bytes)
    clusters = [setup.cluster for setup in setups]
    pools, counts = pools_of(clusters)
    conditions = job_conditions.gangs(pools, counts, state_bytes).later(np.array(compile_s))
    usd_per_hour = np.array([cluster.total_usd_per_hour for cluster in clusters], float)
    expected_count, risk = interruptions(work_hours, conditions, seed=seed)
    start_usd = np.array([cluster.start_usd for cluster in clusters])
    download_usd = start_usd * (1 + expected_count / counts.sum(axis=1))

    def amounts(hours: FloatArray) -> Amounts:
        """Return {"hours": `hours`, "usd": the dollars that the job costs if it takes `hours`}."""
        return {"hours": hours, "usd": (usd_per_hour * hours.T + download_usd).T}

    return JobCosts(
        setups=setups,
        predictions=predictions.reset_index(drop=True),
        conditions=conditions,
        usd_per_hour=usd_per_hour,
        download_usd=download_usd,
        expected=amounts(expected_hours(work_hours, conditions)),
        expected_by_draw=amounts(expected_hours(work_by_draw, conditions)),
        drawn=amounts(drawn_hours(work_by_draw, work_hours, conditions, seed=seed)),
        interruptions=expected_count,
        interruption_risk=risk,
        cluster=np.unique(counts, axis=0, return_inverse=True)[1],
    )
