"""What jobs meet on this provider's machines: start-up, interruptions, waiting, by our own launches and stated priors.

The one place that says so: the table, a campaign's contenders, the ledger and advice all ask here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from models.circumstances import exposure, spot
from models.circumstances.availability import fit_availability
from models.circumstances.checkpoints import prior_checkpoints
from models.circumstances.conditions import Circumstances, Learned, Stated
from models.circumstances.hazard import fit_hazard
from models.circumstances.startup import PRIOR_S, StartupModel, fit_startup
from warehouse import reads

from .installation import Installation

# Before there are launches of our own: GCP's machines with a GPU took 69 s on demand and 87 s preemptible from request
# to running (models/circumstances/startup.py); loading the agent and torchrun there is a guess, twice what local hosts
# take.
_TO_WORK_S = 21.0
EC2_STARTUP_S = {market: seconds + _TO_WORK_S for market, seconds in PRIOR_S.items()}
LOCAL_STARTUP_S = dict.fromkeys(PRIOR_S, spot.STARTUP_S)


def circumstances(here: Installation) -> Circumstances:
    """By the launches in the warehouse; without any the prior stands.

    Local hosts are revoked exactly as often as srift.toml states and refused only where they do not fit: nothing of
    that is learned, and until one was launched their start-up is taken to be known. They start alike in both markets.
    """
    machines, refusals = reads.launched(here.warehouse, here.provider.name)
    launches = exposure.launches(machines)
    if here.provider.name == "local":
        if not len(launches):
            return Stated()
        return Learned(startup=_startup(here, launches), checkpoint=prior_checkpoints())
    windows = exposure.windows(machines)
    return Learned(
        startup=_startup(here, launches),
        checkpoint=prior_checkpoints(),
        hazard=fit_hazard(
            windows,
            advised=_advised(here) if len(windows) else {},
            by_hour=exposure.by_hour(machines),
            together=exposure.together(machines),
        ),
        availability=fit_availability(exposure.requests(machines, refusals)),
    )


def _startup(here: Installation, launches: pd.DataFrame) -> StartupModel:
    """Local hosts start alike in both markets, so that each launch tells of both."""
    if here.provider.name != "local":
        return fit_startup(launches, EC2_STARTUP_S)
    one, *_ = LOCAL_STARTUP_S
    found = fit_startup(launches.assign(market=one), LOCAL_STARTUP_S)
    pools = {(name, market): known for (name, _), known in found.pools.items() for market in LOCAL_STARTUP_S}
    return replace(found, pools=pools, markets=dict.fromkeys(LOCAL_STARTUP_S, found.markets[one]))


def _advised(here: Installation) -> dict[str, float]:
    """Interruptions an hour by type, as the newest snapshot of offers tells them."""
    offers = reads.offers(here.warehouse, here.provider.name)
    told = offers[(offers["market"] == "spot") & offers["interruptions_per_hour"].notna()]
    return {
        str(name): float(one) for name, one in told.groupby("instance_type")["interruptions_per_hour"].mean().items()
    }


def seconds_to_work(here: Installation, market: str) -> float | None:
    """Median seconds from asking for a machine to its being at work, by own launches that tell of `market`, or None."""
    launches = exposure.launches(reads.launched(here.warehouse, here.provider.name)[0])
    alike = here.provider.name == "local"
    if not len(launches if alike else launches[launches["market"] == market]):
        return None
    return float(np.exp(_startup(here, launches).markets[market][0]))
