"""Model the seconds that torch.compile adds before the first steps of a workload.

    log seconds = mu + noise

mu is fitted for each workload and mode, with a normal prior around the log of `prior_s(mode)`.
"""

import numpy as np
import pandas as pd

from ..domain.workload import Mode

# Seconds to compile one input shape of a small network on one core.
COMPILE_S = 40.0
# Standard deviations of log seconds between workloads, and between repeats. Both are guesses.
_PRIOR_SD, _REPEAT_SD = 1.0, 0.2


def prior_s(mode: Mode) -> float:
    """Return the compilation seconds to assume before any compilation was measured.

    Returns 0 if `mode` does not use torch.compile. The result is doubled for FSDP and ZeRO-2, which
    compile each block of layers separately.
    """
    return mode.compiled * (1 + mode.gathered) * COMPILE_S


def fit_compilation(compiled: pd.DataFrame) -> dict[tuple[str, Mode], float]:
    """Return the fitted compilation seconds of each workload and mode.

    `compiled` has a row for each run that used torch.compile, with columns workload, precision,
    strategy, switches and seconds.
    """
    learned = {}
    for names, rows in compiled.groupby(["workload", *Mode._fields]):
        workload, *values = map(str, names)
        mode = Mode(*values)
        weight = len(rows) / (len(rows) + (_REPEAT_SD / _PRIOR_SD) ** 2)
        prior = np.log(prior_s(mode))
        mean = np.log(rows["seconds"].to_numpy(float)).mean()
        learned[workload, mode] = np.exp(prior + weight * (mean - prior))
    return learned
