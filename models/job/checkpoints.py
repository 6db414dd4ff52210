"""Model how long checkpoints take to write or read, and how often to write them.

The seconds to write or read a checkpoint depend on its size and the instance type:

    x           = log(3.6 s + 0.02 s per MB)
    log seconds = x + mu + u_type + b (x - mean of x) + noise

CM-DARE [Li et al. 2020] measured the line 3.6 s + 0.02 s per MB on the storage of another cloud.
Its two constants are not fitted, because checkpoints of a few workloads do not determine them.
Three corrections are fitted, with normal priors around 0: mu for all checkpoints, u_type for each
instance type, and b for the size of the checkpoint.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ..domain.numeric import FloatArray
from .log_seconds import LogSeconds


def best_interval(
    checkpoint_hours: FloatArray | float, hazard_per_hour: FloatArray | float
) -> FloatArray:
    """Return Daly's optimal checkpoint interval: the hours of work between two checkpoints.

    `checkpoint_hours` is the time to write a checkpoint. `hazard_per_hour` is the expected number
    of interruptions per hour.
    """
    mean = 1 / np.maximum(hazard_per_hour, 1e-12)
    ratio = checkpoint_hours / (2 * mean)
    factor = 1 + np.sqrt(ratio) / 3 + ratio / 9
    interval = np.sqrt(2 * checkpoint_hours * mean) * factor - checkpoint_hours
    return np.where(checkpoint_hours < 2 * mean, interval, mean)


def pieces(work_hours: FloatArray | float, interval_hours: FloatArray | float) -> FloatArray:
    """Return the number of equal pieces into which checkpoints divide the work.

    There are as few pieces as possible, but no piece is longer than `interval_hours`.
    """
    return np.maximum(np.ceil(work_hours / np.maximum(interval_hours, 1e-9) - 1e-9), 1.0)


def write_seconds(
    model: LogSeconds, state_bytes: float, types: Sequence[str]
) -> tuple[FloatArray, FloatArray]:
    """Return two (types,) arrays: median write seconds, and standard deviations of log seconds.

    model: the fitted checkpoint seconds (see `fit_checkpoints`).
    state_bytes: the size of the checkpoint.
    types: names of instance types.
    """
    x = _line(np.full(len(types), state_bytes))
    middle, log_sd = model.predict([("", name) for name in types], x)
    return np.exp(x + middle), log_sd


def _line(state_bytes: ArrayLike) -> FloatArray:
    """Return the log of the seconds that CM-DARE's line predicts for a checkpoint of this size."""
    return np.log(3.6 + 0.02 * np.asarray(state_bytes, float) / 1e6)


# Prior of the measured seconds divided by the seconds of CM-DARE's line (see `_line`). CM-DARE's
# networks scatter by about 10 % around the line (`noise_sd`). The other standard deviations are
# guesses.
PRIOR = LogSeconds(
    groups={"": (0.0, 0.5)},
    member_sd=0.3,
    noise_sd=0.1,
    slope=(0.0, 0.1),
    centre=float(_line(100e6)),
)


def fit_checkpoints(written: pd.DataFrame) -> LogSeconds:
    """Fit the ratio of measured checkpoint seconds to the seconds that CM-DARE's line predicts.

    `written` has a row per checkpoint, with columns workload, instance_type, bytes and seconds. The
    fit uses the median seconds of each combination of workload, instance_type and bytes.
    """
    # The median ignores a checkpoint that was written while the disk was busy.
    cells = written.groupby(["workload", "instance_type", "bytes"])["seconds"].median()
    rows = cells.reset_index().rename(columns={"instance_type": "member"}).assign(group="")
    x = _line(rows["bytes"])
    return PRIOR.fitted(rows.assign(x=x, seconds=rows["seconds"] / np.exp(x)))
