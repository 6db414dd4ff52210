"""Start-up, interruptions and waiting on a provider's machines, by launches and stated priors.

The table, the campaign, the regret ledger and advice all ask here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from models.campaign.candidates import EC2_COSTS, Costs
from models.job import launch_history as history
from models.job.capacity import PRIOR_S, fit_availability, fit_startup
from models.job.checkpoints import fit_checkpoints, fit_reads
from models.job.compilation import fit_compilation
from models.job.duration import STARTUP_S
from models.job.interruption_rates import fit_hazard
from models.job.job_conditions import JobConditions, Learned, Stated
from models.job.log_seconds import LogSeconds
from models.job.restarts import fit_restarts
from warehouse import reads

from ..workspace.workspace import Workspace

# Without launches: GCP's machines with a GPU took 69 s on demand and 87 s preemptible from request
# to running (`PRIOR_S`). Loading the agent and torchrun is a guess, twice that of local hosts.
_TO_WORK_S = 21.0
EC2_STARTUP_S = {market: seconds + _TO_WORK_S for market, seconds in PRIOR_S.items()}
LOCAL_STARTUP_S = dict.fromkeys(PRIOR_S, STARTUP_S)
LOCAL_SLOPE = (0.5, 0.5)  # hosts start on one machine: between side by side and in turn


def job_conditions(workspace: Workspace) -> JobConditions:
    """Return what the warehouse's launches taught; without any, the prior.

    Local hosts are interrupted as srift.toml states and refused only if they do not fit: neither is
    learned. Until one was launched their start-up counts as known.
    """
    machines, refusals, written, compiled, restarts = reads.launched(
        workspace.warehouse, workspace.provider.name
    )
    launches = history.launches(machines)
    if workspace.simulated and not len(launches):
        return Stated()
    learned = Learned(
        startup=_startup(workspace, launches),
        checkpoints=fit_checkpoints(written),
        compilation=fit_compilation(compiled),
        reads=fit_reads(_read_back(restarts)),
        restarts=fit_restarts(restarts),
    )
    if workspace.simulated:
        return learned
    windows = history.windows(machines)
    advised = _advised(workspace) if len(windows) else {}
    return replace(
        learned,
        hazard=fit_hazard(windows, advised=advised, together=history.together(machines)),
        availability=fit_availability(history.requests(machines, refusals)),
    )


def _read_back(restarts: pd.DataFrame) -> pd.DataFrame:
    """Return checkpoints that were read: workload, instance_type, bytes, seconds."""
    if not len(restarts):
        return restarts
    read = restarts[restarts["restore_s"].notna()].drop(columns="seconds")
    return read.rename(columns={"restore_bytes": "bytes", "restore_s": "seconds"})


def _startup(workspace: Workspace, launches: pd.DataFrame) -> LogSeconds:
    """Local hosts start alike in both markets: each launch counts for both."""
    if not workspace.simulated:
        return fit_startup(launches, EC2_STARTUP_S)
    first, *_ = LOCAL_STARTUP_S
    found = fit_startup(launches.assign(market=first), LOCAL_STARTUP_S, LOCAL_SLOPE)
    members = {
        (market, name): known
        for (_, name), known in found.members.items()
        for market in LOCAL_STARTUP_S
    }
    groups = dict.fromkeys(LOCAL_STARTUP_S, found.groups[first])
    return replace(found, members=members, groups=groups)


def _advised(workspace: Workspace) -> dict[str, float]:
    """Return interruptions an hour by type in the newest snapshot."""
    offers = reads.mart(workspace.warehouse, "offers", provider=workspace.provider.name)
    advised = offers[(offers["market"] == "spot") & offers["interruptions_per_hour"].notna()]
    return dict(advised.groupby("instance_type")["interruptions_per_hour"].mean())


def spot_experience(workspace: Workspace) -> dict[str, str]:
    """Describe, by instance type, the interruptions of launches; nothing for local hosts."""
    if workspace.simulated:
        return {}
    machines, *_ = reads.launched(workspace.warehouse, workspace.provider.name)
    held = history.spot_held(machines)
    if not len(held):
        return {}
    found = {}
    for name, rows in held.groupby("instance_type"):
        count, hours = int(rows["interrupted"].sum()), rows["hours"].sum()
        last = f"{pd.Timestamp(rows['asked_at'].max()):%Y-%m-%d}"
        noun = "interruption" if count == 1 else "interruptions"
        found[str(name)] = (
            f"own launches: {count} {noun} in {hours:.3g} machine-hours, the last on {last}"
        )
    return found


def seconds_to_work(workspace: Workspace, market: str) -> float | None:
    """Return the median seconds from a request to work; None without launches of the market."""
    launches = history.launches(reads.launched(workspace.warehouse, workspace.provider.name)[0])
    known = len(launches) if workspace.simulated else (launches["market"] == market).sum()
    return float(np.exp(_startup(workspace, launches).groups[market][0])) if known else None


def costs_of(workspace: Workspace) -> Costs:
    """Return the seconds that a campaign expects to pay."""
    stated = Costs() if workspace.simulated else EC2_COSTS
    launch_s = seconds_to_work(workspace, workspace.settings.campaign.market)
    return stated if launch_s is None else replace(stated, launch_s=launch_s)
