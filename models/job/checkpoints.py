"""Seconds to write or read a checkpoint, by its bytes and the type of machine.

    seconds = (a + k MB) exp(u_type) exp(v_workload)

Linear in bytes (CM-DARE [P]: 3.6 s + 0.02 s/MB on its cloud's storage). log a and log k are normal
around CM-DARE's, u and v around 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..domain.numeric import FloatArray

# Standard deviations in logs. CM-DARE's networks lie about a tenth around its line, repeats a
# twentieth; the other two are guesses. No read times are published, and a page cache may serve a
# read: their prior is wider.
_PRIOR_LOG = np.log([3.6, 0.02])
_PRIOR_SD, _TYPE_SD, _WORKLOAD_SD, _REPEAT_SD = 0.5, 0.3, 0.1, 0.05
_READ_SD = 1.0
_SPREAD_WEIGHT = 6.0  # checkpoints that the prior of the repeats' spread counts as
_STATE_PER_WEIGHT = 3  # Adam keeps two moments beside the weights


def checkpoint_bytes(gradient_bytes: float | None, measured: float | None = None) -> float:
    """Return `measured`, else an estimate from the gradient's bytes, else 0."""
    if measured is not None and measured > 0:
        return float(measured)
    if gradient_bytes is None or np.isnan(gradient_bytes):
        return 0.0
    return _STATE_PER_WEIGHT * float(gradient_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointModel:
    """log a, log k and u of `types`, their covariance, and the spread of repeats."""

    location: FloatArray
    covariance: FloatArray
    types: tuple[str, ...] = ()
    repeat_sd: float = _REPEAT_SD

    def seconds(self, state_bytes: float, types: Sequence[str]) -> tuple[FloatArray, FloatArray]:
        """Return (types,) expected seconds and standard deviations of their logs."""
        terms = np.exp(self.location[:2]) * [1.0, state_bytes / 1e6]
        names, known = (np.array(list(one), dtype=object) for one in (types, self.types))
        is_type = (names[:, None] == known).astype(float)
        gradient = np.hstack([np.tile(terms / terms.sum(), (len(types), 1)), is_type])
        variance = ((gradient @ self.covariance) * gradient).sum(axis=1)
        variance += np.where(is_type.any(axis=1), 0.0, _TYPE_SD**2)
        variance += _WORKLOAD_SD**2 + self.repeat_sd**2
        return terms.sum() * np.exp(is_type @ self.location[2:]), np.sqrt(variance)


PRIOR = CheckpointModel(_PRIOR_LOG, np.diag([_PRIOR_SD**2] * 2))


def fit_reads(read: pd.DataFrame) -> CheckpointModel | None:
    """Fit seconds to read checkpoints as `fit_checkpoints` does; None without rows."""
    return fit_checkpoints(read, prior_sd=_READ_SD) if len(read) else None


def fit_checkpoints(written: pd.DataFrame, *, prior_sd: float = _PRIOR_SD) -> CheckpointModel:
    """Fit columns workload, instance_type, bytes, seconds, a row a checkpoint; the prior without
    rows.
    """
    if not len(written):
        return PRIOR
    logs = written.assign(log_s=np.log(written["seconds"].to_numpy(float)))
    repeats = logs.groupby(["workload", "instance_type", "bytes"])["log_s"]
    # the median: a checkpoint written while the disk was busy does not move it
    cells = repeats.agg(["median", "var", "size"]).reset_index()
    square = (cells["var"].fillna(0.0) * (cells["size"] - 1)).sum()
    freedom = len(logs) - len(cells) + _SPREAD_WEIGHT
    repeat_sd = float(np.sqrt((square + _SPREAD_WEIGHT * _REPEAT_SD**2) / freedom))
    noise = repeat_sd * np.sqrt(np.pi / 2 / cells["size"])
    types, workloads = (pd.get_dummies(cells[name]) for name in ("instance_type", "workload"))
    dummies = np.hstack([types.to_numpy(float), workloads.to_numpy(float)])
    mean = np.concatenate([_PRIOR_LOG, np.zeros(dummies.shape[1])])
    sd = np.repeat([prior_sd, _TYPE_SD, _WORKLOAD_SD], [2, types.shape[1], workloads.shape[1]])

    def residuals(location: FloatArray) -> FloatArray:
        line = np.log(np.exp(location[0]) + np.exp(location[1]) * cells["bytes"] / 1e6)
        error = (line + dummies @ location[2:] - cells["median"]) / noise
        return np.concatenate([error, (location - mean) / sd])

    from scipy.optimize import least_squares  # slow to import, and not every answer fits

    found = least_squares(residuals, mean)
    kept = 2 + types.shape[1]
    jacobian = np.asarray(found.jac)
    covariance = np.linalg.inv(jacobian.T @ jacobian)[:kept, :kept]
    return CheckpointModel(found.x[:kept], covariance, tuple(types.columns), repeat_sd)
