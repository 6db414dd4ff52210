"""Seconds from the loss of a machine to the next step of an elastic job, without reading its
checkpoint.

'fewer': the job goes on without the machine. 'replaced': another machine takes its place first.
"""

from __future__ import annotations

import pandas as pd

from .duration import REPLACEMENT_S
from .log_seconds import LogSeconds, Prior, fit_log_seconds, prior_of

# Before any restart: torchrun's elastic mode took 10 s after a kill in first trials on local hosts.
PRIOR_S = {"fewer": 10.0, "replaced": REPLACEMENT_S}
_PRIOR = Prior(median_s=PRIOR_S, group_sd=0.7, member_sd=0.3, noise_sd=0.2)
NO_RESTARTS = prior_of(_PRIOR)


def fit_restarts(restarts: pd.DataFrame) -> LogSeconds:
    """Fit columns outcome, instance_type, seconds, a row a restart; ignore other outcomes.

    Raises:
        ValueError: for seconds that are not above 0.
    """
    if not len(restarts):
        return NO_RESTARTS
    known = restarts[restarts["outcome"].isin(list(PRIOR_S))]
    columns = {"outcome": "group", "instance_type": "member"}
    return fit_log_seconds(known.rename(columns=columns).assign(x=0.0), _PRIOR)
