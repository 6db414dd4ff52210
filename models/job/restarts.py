"""Model the seconds from the loss of a machine to the next training step of an elastic job.

The seconds to read the checkpoint are not included. A restart has one of two outcomes:

- 'fewer': the job continues with fewer machines.
- 'replaced': the job waits until another machine has replaced the lost machine.
"""

import math

import pandas as pd

from .log_seconds import LogSeconds

# Prior seconds. On local hosts, torchrun's elastic mode took 10 s after a kill in first trials, and
# 22 s after a cut link.
PRIOR_S = {"fewer": 10.0, "replaced": 22.0}
NO_RESTARTS = LogSeconds(
    groups={outcome: (math.log(seconds), 0.7) for outcome, seconds in PRIOR_S.items()},
    member_sd=0.3,
    noise_sd=0.2,
)


def fit_restarts(restarts: pd.DataFrame) -> LogSeconds:
    """Fit the seconds that an elastic job needs to continue after it lost a machine.

    `restarts` has a row per restart, with columns outcome, instance_type and seconds. Only rows
    with one of two outcomes are used: 'fewer' (the job continued with fewer machines) or 'replaced'
    (the job waited for another machine).

    Raises:
        ValueError: if seconds are not above 0.
    """
    columns = {"outcome": "group", "instance_type": "member"}
    rows = restarts.rename(columns=columns).assign(x=0.0)
    return NO_RESTARTS.fitted(rows[rows["group"].isin(list(PRIOR_S))])
