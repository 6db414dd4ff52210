"""What jobs meet on this provider's machines: start-up, interruptions, waiting, by our own launches and stated priors.

The one place that says so: the table, a campaign's contenders, the ledger and advice all ask here.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from models.circumstances import exposure, spot
from models.circumstances.availability import fit_availability
from models.circumstances.checkpoints import prior_checkpoints
from models.circumstances.conditions import Circumstances, Learned, Stated
from models.circumstances.hazard import fit_hazard
from models.circumstances.startup import PRIOR_S, fit_startup
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
        alike = pd.concat([launches.assign(market=market) for market in LOCAL_STARTUP_S], ignore_index=True)
        return Learned(startup=fit_startup(alike, LOCAL_STARTUP_S), checkpoint=prior_checkpoints())
    windows = exposure.windows(machines)
    return Learned(
        startup=fit_startup(launches, EC2_STARTUP_S),
        checkpoint=prior_checkpoints(),
        hazard=fit_hazard(
            windows,
            advised=_advised(here) if len(windows) else {},
            by_hour=exposure.by_hour(machines),
            together=exposure.together(machines),
        ),
        availability=fit_availability(exposure.requests(machines, refusals)),
    )


def _advised(here: Installation) -> dict[str, float]:
    """Interruptions an hour by type, as the newest snapshot of offers tells them."""
    offers = reads.offers(here.warehouse, here.provider.name)
    told = offers[(offers["market"] == "spot") & offers["interruptions_per_hour"].notna()]
    return {
        str(name): float(one) for name, one in told.groupby("instance_type")["interruptions_per_hour"].mean().items()
    }


def seconds_to_work(here: Installation, market: str) -> float | None:
    """Median seconds from asking for a machine to its being at work, by our own launches in `market`; None without."""
    launches = exposure.launches(reads.launched(here.warehouse, here.provider.name)[0])
    if not (launches["market"] == market).any():
        return None
    prior_s = LOCAL_STARTUP_S if here.provider.name == "local" else EC2_STARTUP_S
    return float(np.exp(fit_startup(launches, prior_s).markets[market][0]))
