"""Seconds to write a checkpoint, or to read one back, by its bytes and the type of machine.

seconds = (a + k MB) exp(u_type)      linear in bytes (CM-DARE [P]); u: a type's disk against the others'
log a, log k ~ normal around CM-DARE's cloud, u ~ normal around 0; learned from checkpoints that were written
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..domain.numeric import FloatArray

# CM-DARE [P, physics.md]: 3.6 s + 0.02 s/MB on its cloud's storage. Ours may differ by a factor: half of a or k is one
# standard deviation. Relative spread: CM-DARE's networks lie about a tenth around its line, repeats a twentieth. How
# far the disks of two types differ is a guess.
_PRIOR_LOG = np.log([3.6, 0.02])
_PRIOR_SD, _TYPE_SD, _BETWEEN, _WITHIN = 0.5, 0.3, 0.1, 0.05
_RESTORE_SD = 1.0  # of reading, which is taken to last as long: nobody has published any, and a page cache may serve it
_SPREAD_WEIGHT = 6.0  # checkpoints that the prior of the spread of repeats counts as
_STEPS, _SETTLED = 50, 1e-9  # of the fit, at most, and the largest change in the last one
_STATE_PER_WEIGHT = (
    3  # bytes of a checkpoint per byte of weights: Adam keeps two moments beside them
)


def checkpoint_bytes(gradient_bytes: float | None, measured: float | None = None) -> float:
    """Bytes of a checkpoint: as `measured`, or else by those of the gradient; 0 where neither is known (None, NaN)."""
    if measured is not None and measured > 0:
        return float(measured)
    return (
        0.0
        if gradient_bytes is None or np.isnan(gradient_bytes)
        else _STATE_PER_WEIGHT * float(gradient_bytes)
    )


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointModel:
    """log a, log k and the deviations of `types`, with their (2 + types, 2 + types) covariance; `spread` of repeats."""

    location: FloatArray
    covariance: FloatArray
    types: tuple[str, ...] = ()
    spread: float = _WITHIN

    def seconds(self, state_bytes: float, types: Sequence[str]) -> tuple[FloatArray, FloatArray]:
        """(types,) expected seconds of a workload's checkpoints on each type, and standard deviations of their logs."""
        slopes, known = _slopes(self.location, np.full(len(types), state_bytes / 1e6))
        own = [self.types.index(one) if one in self.types else -1 for one in types]
        mine = np.array(own, dtype=int)[:, None] == np.arange(len(self.types))
        gradient = np.hstack([slopes, mine])
        variance = np.einsum("ij,jk,ik->i", gradient, self.covariance, gradient)
        variance += np.where(np.array(own) < 0, _TYPE_SD**2, 0.0) + _BETWEEN**2 + self.spread**2
        return np.exp(known + gradient[:, 2:] @ self.location[2:]), np.sqrt(variance)


def fit_restores(read: pd.DataFrame) -> CheckpointModel | None:
    """Of reading checkpoints back, as `fit_checkpoints` is of writing them, with a wider prior; None for no rows."""
    return fit_checkpoints(read, prior_sd=_RESTORE_SD) if len(read) else None


def fit_checkpoints(written: pd.DataFrame, *, prior_sd: float = _PRIOR_SD) -> CheckpointModel:
    """Learned from `written`: workload, instance_type, bytes, seconds, one row a checkpoint; the prior for none.

    Checkpoints of one workload and size on one type are repeats; a workload's lie around the line together. Raises
    ValueError where bytes or seconds are not above 0.
    """
    if not len(written):
        return PRIOR
    numbers = written[["bytes", "seconds"]].to_numpy(dtype=float)
    if not ((numbers > 0) & np.isfinite(numbers)).all():
        raise ValueError("bytes and seconds of checkpoints must be above 0")
    logs = written.assign(
        log_s=np.log(written["seconds"].astype(float)), mb=written["bytes"].astype(float) / 1e6
    )
    groups = logs.groupby(["workload", "instance_type", "mb"])["log_s"]
    apart = float(((logs["log_s"] - groups.transform("mean")) ** 2).sum())
    free = len(logs) - groups.ngroups
    spread = float(np.sqrt((apart + _SPREAD_WEIGHT * _WITHIN**2) / (free + _SPREAD_WEIGHT)))
    cells = groups.agg(
        ["median", "size"]
    ).reset_index()  # one checkpoint while the disk was busy moves no median
    types, type_at = np.unique(cells["instance_type"].astype(str), return_inverse=True)
    networks, network_at = np.unique(cells["workload"].astype(str), return_inverse=True)
    mb, middle = cells["mb"].to_numpy(), cells["median"].to_numpy()
    noise = spread * np.sqrt(np.pi / 2 / cells["size"].to_numpy())  # standard error of a median
    many = 2 + len(types)
    prior = np.concatenate(
        [np.full(2, prior_sd), np.full(len(types), _TYPE_SD), np.full(len(networks), _BETWEEN)]
    )
    centre = np.concatenate([_PRIOR_LOG, np.zeros(len(types) + len(networks))])

    dummies = np.hstack([np.eye(len(types))[type_at], np.eye(len(networks))[network_at]])

    def residuals(location: FloatArray) -> tuple[FloatArray, FloatArray]:
        """With their derivatives."""
        slopes, line = _slopes(location, mb)
        off = np.concatenate(
            [(line + dummies @ location[2:] - middle) / noise, (location - centre) / prior]
        )
        return off, np.vstack([np.hstack([slopes, dummies]) / noise[:, None], np.diag(1 / prior)])

    # Gauss-Newton with halved steps: scipy.optimize takes longer to import than all of an answer's fits together
    location, (off, jacobian) = centre, residuals(centre)
    for _ in range(_STEPS):
        step = np.linalg.lstsq(jacobian, -off)[0]
        while (
            np.abs(step).max() > _SETTLED
            and not (nearer := residuals(location + step))[0] @ nearer[0] < off @ off
        ):
            step = step / 2
        if np.abs(step).max() <= _SETTLED:
            break
        location, (off, jacobian) = location + step, nearer
    covariance = np.asarray(np.linalg.inv(jacobian.T @ jacobian), dtype=float)
    return CheckpointModel(location[:many], covariance[:many, :many], tuple(types.tolist()), spread)


def _slopes(location: FloatArray, mb: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(rows, 2) derivatives of log(a + k MB) by log a and log k, and (rows,) its value."""
    parts = np.stack([np.full(len(mb), np.exp(location[0])), np.exp(location[1]) * mb], axis=1)
    whole = parts.sum(axis=1)
    return parts / whole[:, None], np.log(whole)


PRIOR = CheckpointModel(_PRIOR_LOG, np.eye(2) * _PRIOR_SD**2)
