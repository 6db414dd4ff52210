"""Learn a provider's start-up times, interruptions, refusals and costs from past launches."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from models.campaign.candidates import EC2_COSTS, Costs
from models.job.capacity import PRIOR_S, fit_availability, fit_startup
from models.job.checkpoints import fit_checkpoints
from models.job.compilation import fit_compilation
from models.job.duration import STARTUP_S
from models.job.interruption_rates import fit_hazard
from models.job.job_conditions import JobConditions
from models.job.log_seconds import LogSeconds
from models.job.restarts import fit_restarts
from warehouse import reads

from ..workspace.workspace import Workspace

# Prior start-up seconds, used until a launch was measured. From the request until they ran, GPU
# machines of GCP took 69 s on demand and 87 s preemptible (`PRIOR_S`). Loading the agent and
# torchrun is assumed to take about twice as long as on local hosts.
_TO_WORK_S = 21.0
EC2_STARTUP_S = {market: seconds + _TO_WORK_S for market, seconds in PRIOR_S.items()}
LOCAL_STARTUP_S = dict.fromkeys(PRIOR_S, STARTUP_S)
# Prior mean and standard deviation of d log(start-up seconds) / d log(hosts). Hosts share one
# machine, so that more hosts start more slowly.
LOCAL_SLOPE = (0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class Experience:
    """Models that were fitted to past launches, and results of earlier runs.

    conditions: the models of start-up, checkpoints and interruptions of a training job.
    costs: the estimated seconds that launches and benchmark runs take.
    interruptions: {instance type: text about its spot machines}, such as "interruptions in 12
        machine-hours of own launches: 3".
    learning: rows of the mart `learning`, which compare the losses of strategies.
    downloads: rows of the table `raw_downloads`, with the sizes of workloads' data.
    """

    conditions: JobConditions
    costs: Costs
    interruptions: Mapping[str, str]
    learning: pd.DataFrame
    downloads: pd.DataFrame


def experience_of(workspace: Workspace) -> Experience:
    """Return models fitted to the launches in the warehouse, or priors if there are no launches.

    For local hosts, interruptions and refused launches are not modelled. srift.toml sets the rate
    of interruptions. A launch of local hosts is refused only if the hosts do not fit on this
    computer.
    """
    warehouse, provider = workspace.warehouse, workspace.provider.name
    history, market = reads.launch_events(warehouse, provider), workspace.settings.campaign.market
    launches, windows = history["starts"], history["spot_days"]
    local = not workspace.spends_money
    startup = _startup(launches, local)
    costs = Costs() if local else EC2_COSTS
    if (local and len(launches)) or (launches["market"] == market).any():
        costs = replace(costs, launch_s=float(np.exp(startup.groups[market][0])))
    conditions = JobConditions(
        startup=startup,
        checkpoints=fit_checkpoints(history["checkpoints"]),
        compiled=fit_compilation(history["compilations"]),
        restarts=fit_restarts(history["restarts"]),
    )
    interruptions = {}
    if not local:
        conditions = replace(
            conditions,
            hazard=fit_hazard(
                windows,
                advised=reads.advised_rates(warehouse, provider),
                together=history["lost_together"],
            ),
            availability=fit_availability(history["requests"]),
        )
        totals = windows.groupby("instance_type")[["hours", "interruptions"]].sum()
        interruptions = {
            name: f"interruptions in {hours:.3g} machine-hours of own launches: {count}"
            for name, hours, count in totals.itertuples()
        }
    return Experience(
        conditions=conditions,
        costs=costs,
        interruptions=interruptions,
        learning=workspace.mart("learning"),
        downloads=warehouse.select("raw_downloads"),
    )


def _startup(launches: pd.DataFrame, local: bool) -> LogSeconds:
    """Fit the start-up seconds of machines, for each market and instance type.

    launches: a row for each launch and instance type (warehouse/launches/starts.sql).
    local: True for local hosts, which start equally fast in both markets.
    """
    if not local:
        return fit_startup(launches, EC2_STARTUP_S)
    first, *_ = LOCAL_STARTUP_S
    fit = fit_startup(launches.assign(market=first), LOCAL_STARTUP_S, LOCAL_SLOPE)
    members = {
        (market, name): estimate
        for (_, name), estimate in fit.members.items()
        for market in LOCAL_STARTUP_S
    }
    groups = dict.fromkeys(LOCAL_STARTUP_S, fit.groups[first])
    return replace(fit, members=members, groups=groups)
