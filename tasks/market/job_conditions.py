"""What jobs meet on this provider's machines: start-up, interruptions, waiting, by our own launches and stated priors.

The one place that says so: the table, a campaign's decisions, the ledger and advice all ask here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from models.campaign.candidates import EC2_COSTS, Costs
from models.job import duration as spot
from models.job import launch_history as exposure
from models.job.capacity import PRIOR_S, fit_availability, fit_startup
from models.job.checkpoints import fit_checkpoints, fit_reads
from models.job.compilation import fit_compilation
from models.job.interruption_rates import fit_hazard
from models.job.job_conditions import JobConditions, Learned, Stated
from models.job.log_seconds import LogSeconds
from models.job.restarts import fit_restarts
from warehouse import reads

from ..workspace.workspace import Workspace

# Before there are launches of our own: GCP's machines with a GPU took 69 s on demand and 87 s preemptible from request
# to running (`PRIOR_S`); loading the agent and torchrun there is a guess, twice what local hosts take.
_TO_WORK_S = 21.0
EC2_STARTUP_S = {market: seconds + _TO_WORK_S for market, seconds in PRIOR_S.items()}
LOCAL_STARTUP_S = dict.fromkeys(PRIOR_S, spot.STARTUP_S)
LOCAL_SLOPE = (
    0.5,
    0.5,
)  # hosts share one machine, on which they start: between side by side and one after another


def job_conditions(workspace: Workspace) -> JobConditions:
    """By the launches in the warehouse; without any the prior stands.

    Local hosts are revoked exactly as often as srift.toml states and refused only where they do not fit: nothing of
    that is learned, and until one was launched their start-up is taken to be known. They start alike in both markets.
    """
    machines, refusals, written, compiled, restarts = reads.launched(
        workspace.warehouse, workspace.provider.name
    )
    launches = exposure.launches(machines)
    if workspace.simulated and not len(launches):
        return Stated()
    learned = Learned(
        startup=_startup(workspace, launches),
        checkpoints=fit_checkpoints(written),
        compilation=fit_compilation(compiled),
        reads=fit_reads(_restored(restarts)),
        restarts=fit_restarts(restarts),
    )
    if workspace.simulated:
        return learned
    windows = exposure.windows(machines)
    advised = _advised(workspace) if len(windows) else {}
    return replace(
        learned,
        hazard=fit_hazard(windows, advised=advised, together=exposure.together(machines)),
        availability=fit_availability(exposure.requests(machines, refusals)),
    )


def _restored(restarts: pd.DataFrame) -> pd.DataFrame:
    """Checkpoints that were read back: workload, instance_type, bytes, seconds."""
    if not len(restarts):
        return restarts
    read = restarts[restarts["restore_s"].notna()].drop(columns="seconds")
    return read.rename(columns={"restore_bytes": "bytes", "restore_s": "seconds"})


def _startup(workspace: Workspace, launches: pd.DataFrame) -> LogSeconds:
    """Local hosts start alike in both markets, so that each launch tells of both."""
    if not workspace.simulated:
        return fit_startup(launches, EC2_STARTUP_S)
    one, *_ = LOCAL_STARTUP_S
    found = fit_startup(launches.assign(market=one), LOCAL_STARTUP_S, LOCAL_SLOPE)
    members = {
        (market, name): known
        for (_, name), known in found.members.items()
        for market in LOCAL_STARTUP_S
    }
    groups = dict.fromkeys(LOCAL_STARTUP_S, found.groups[one])
    return replace(found, members=members, groups=groups)


def _advised(workspace: Workspace) -> dict[str, float]:
    """Interruptions an hour by type, as the newest snapshot of offers tells them."""
    offers = reads.offers(workspace.warehouse, workspace.provider.name)
    advised = offers[(offers["market"] == "spot") & offers["interruptions_per_hour"].notna()]
    return dict(advised.groupby("instance_type")["interruptions_per_hour"].mean())


def spot_experience(workspace: Workspace) -> dict[str, str]:
    """By instance type, what own launches tell of its interruptions, in words; of local hosts srift.toml tells all."""
    if workspace.simulated:
        return {}
    machines, *_ = reads.launched(workspace.warehouse, workspace.provider.name)
    held = exposure.spot_held(machines)
    if not len(held):
        return {}
    by_type = held.groupby("instance_type").agg(
        hours=("hours", "sum"), interruptions=("interrupted", "sum"), last=("asked_at", "max")
    )
    return {
        str(
            name
        ): f"own launches: {row['interruptions']:.0f} interruption{'s' if row['interruptions'] != 1 else ''} in"
        f" {row['hours']:.3g} machine-hours, the last on {pd.Timestamp(row['last']):%Y-%m-%d}"
        for name, row in by_type.iterrows()
    }


def seconds_to_work(workspace: Workspace, market: str) -> float | None:
    """Median seconds from asking for a machine to its being at work, by own launches that tell of `market`, or None."""
    launches = exposure.launches(reads.launched(workspace.warehouse, workspace.provider.name)[0])
    if (not workspace.simulated and market not in set(launches["market"])) or not len(launches):
        return None
    return float(np.exp(_startup(workspace, launches).groups[market][0]))


def costs_of(workspace: Workspace) -> Costs:
    """Seconds that a campaign expects to pay; anywhere but on this machine a launch is billed for a minute at least."""
    stated = Costs() if workspace.simulated else EC2_COSTS
    launch_s = seconds_to_work(workspace, workspace.settings.campaign.market)
    return stated if launch_s is None else replace(stated, launch_s=launch_s)
