"""Seconds before the first steps of a model that torch.compile compiles, by workload in its mode.

log seconds = mu + noise     mu ~ normal about the log of the stated prior, by the conjugate normal
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from ..domain.workload import Mode

# Of one shape of a small network on one core; of a sharded one each part is compiled. How far
# others may lie from that, and repeats from each other, is a guess, in logs.
COMPILE_S = 40.0
_PRIOR_SD, _REPEAT_SD = 1.0, 0.2


def prior_s(mode: Mode) -> float:
    """Of a workload that was never compiled here; 0 in a mode that compiles nothing."""
    return mode.compiled * (1 + mode.gathered) * COMPILE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileModel:
    """Learned seconds by workload and mode."""

    learned: Mapping[tuple[str, Mode], float] = field(default_factory=dict)

    def seconds(self, workload: str, mode: Mode) -> float:
        """Return the expected compilation seconds, spent at start and after each replacement."""
        return self.learned.get((workload, mode), prior_s(mode)) if mode.compiled else 0.0


def fit_compilation(compiled: pd.DataFrame) -> CompileModel:
    """Learned from `compiled`: workload, the columns of its mode, and seconds, one row a run that
    compiled.
    """
    learned = {}
    for names, rows in compiled.groupby(["workload", *Mode._fields]):
        workload, *values = map(str, names)
        mode = Mode(*values)
        weight = len(rows) / (len(rows) + (_REPEAT_SD / _PRIOR_SD) ** 2)
        prior = np.log(prior_s(mode))
        mean = np.log(rows["seconds"].to_numpy(float)).mean()
        learned[workload, mode] = float(np.exp(prior + weight * (mean - prior)))
    return CompileModel(learned=learned)
