"""Seconds from the loss of a machine to the next step of an elastic job, without reading its
checkpoint.

'fewer': the job goes on without the machine. 'replaced': another machine takes its place first.
"""

from __future__ import annotations

import math

import pandas as pd

from .duration import REPLACEMENT_S
from .log_seconds import LogSeconds

# Before any restart: torchrun's elastic mode took 10 s after a kill in first trials on local hosts.
PRIOR_S = {"fewer": 10.0, "replaced": REPLACEMENT_S}
NO_RESTARTS = LogSeconds(
    groups={outcome: (math.log(seconds), 0.7) for outcome, seconds in PRIOR_S.items()},
    member_sd=0.3,
    noise_sd=0.2,
)


def fit_restarts(restarts: pd.DataFrame) -> LogSeconds:
    """Fit columns outcome, instance_type, seconds, a row a restart; ignore other outcomes.

    Raises:
        ValueError: for seconds that are not above 0.
    """
    columns = {"outcome": "group", "instance_type": "member"}
    rows = restarts.rename(columns=columns).assign(x=0.0)
    return NO_RESTARTS.fitted(rows[rows["group"].isin(list(PRIOR_S))])
