"""Seconds to write, or to read back, a checkpoint of so many megabytes. Never says when one should be written.

    seconds = (a + k MB) (1 + u_group + noise)      linear in bytes, also when a network is held out (CM-DARE [P])

a and k are learned by generalised least squares around a prior, so that no measurement gives the prior and few give
something between; the spread between networks and within one is learned around a prior too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from ..intervals import Z_90

Floats = NDArray[np.float64]

# CM-DARE [P, physics.md]: 3.6 s + 0.02 s/MB on its cloud's storage. Ours may differ by a factor: half of a or k is one
# standard deviation, so that a few checkpoints of our own outweigh it.
BASE_S, S_PER_MB = 3.6, 0.02
_PRIOR_PART = 0.5
# Relative spread before there is data: CM-DARE's networks lie about a tenth around its line, repeats of
# one a twentieth. Each prior weighs as much as so many networks, or repeats.
_BETWEEN, _WITHIN, _WEIGHT = 0.1, 0.05, 4.0
_ROUNDS = 4  # of weights from the last fit; they move by less than a thousandth after two


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointModel:
    """`base_s` + `s_per_mb` MB, the covariance of the two, and the relative spread of a network not seen."""

    base_s: float
    s_per_mb: float
    covariance: tuple[tuple[float, float], tuple[float, float]]
    between: float
    within: float
    rows: int

    def seconds(self, mb: ArrayLike) -> Floats:
        """Expected seconds for `mb` megabytes (10^6 bytes), in its shape."""
        return np.asarray(self.base_s + self.s_per_mb * np.asarray(mb, dtype=float), dtype=float)

    def log_sd(self, mb: ArrayLike) -> Floats:
        """Standard deviation of the log seconds of one checkpoint of a network not seen, in the shape of `mb`."""
        size = np.asarray(mb, dtype=float)
        design = np.stack([np.ones_like(size), size])
        doubt = np.einsum("i...,ij,j...->...", design, np.array(self.covariance), design)
        return np.asarray(np.sqrt(doubt / self.seconds(size) ** 2 + self.between**2 + self.within**2), dtype=float)

    def interval(self, mb: ArrayLike) -> tuple[Floats, Floats]:
        """Central 90 % interval of the seconds of one checkpoint of a network not seen, in the shape of `mb`.

        In logs, since a time is never negative.
        """
        middle, half = self.seconds(mb), Z_90 * self.log_sd(mb)
        return middle * np.exp(-half), middle * np.exp(half)


def prior_checkpoints() -> CheckpointModel:
    """What is said before anything was written."""
    return fit_checkpoints(pd.DataFrame({"mb": [], "seconds": [], "group": []}))


def fit_checkpoints(rows: pd.DataFrame) -> CheckpointModel:
    """The line learned from `rows`: mb, seconds and group (the network), one a checkpoint written.

    Raises ValueError where a time is not positive or a size negative.
    """
    size, seconds = rows["mb"].to_numpy(dtype=float), rows["seconds"].to_numpy(dtype=float)
    if not (np.all(seconds > 0) and np.all(size >= 0)):
        raise ValueError("checkpoints need sizes of at least 0 MB and seconds above 0")
    codes, groups = pd.factorize(rows["group"])
    prior = np.array([BASE_S, S_PER_MB])
    precision = np.diag(1 / (_PRIOR_PART * prior) ** 2)
    design = np.column_stack([np.ones_like(size), size])
    line, covariance, between, within = prior, np.linalg.inv(precision), _BETWEEN, _WITHIN
    for _ in range(_ROUNDS if len(rows) else 0):
        fitted = design @ line
        relative = np.where(codes[:, None] == codes, between**2, 0.0) + within**2 * np.eye(len(rows))
        inverse = np.linalg.inv(relative * np.outer(fitted, fitted))
        covariance = np.linalg.inv(precision + design.T @ inverse @ design)
        line = np.maximum(covariance @ (precision @ prior + design.T @ inverse @ seconds), 0.1 * prior)
        between, within = _spreads(seconds / (design @ line) - 1, codes, len(groups))
    return CheckpointModel(
        base_s=float(line[0]),
        s_per_mb=float(line[1]),
        covariance=((covariance[0, 0], covariance[0, 1]), (covariance[1, 0], covariance[1, 1])),
        between=between,
        within=within,
        rows=len(rows),
    )


def _spreads(residual: Floats, codes: NDArray[np.intp], groups: int) -> tuple[float, float]:
    """Relative standard deviations between and within groups, by moments, shrunk to their priors."""
    repeats = np.bincount(codes, minlength=groups)
    middle = np.bincount(codes, residual, minlength=groups) / repeats
    inside = float(np.sum((residual - middle[codes]) ** 2))
    within = (inside + _WEIGHT * _WITHIN**2) / (float(np.sum(repeats - 1)) + _WEIGHT)
    apart = np.maximum(middle**2 - within / repeats, 0.0)
    between = (float(np.sum(apart)) + _WEIGHT * _BETWEEN**2) / (groups + _WEIGHT)
    return float(np.sqrt(between)), float(np.sqrt(within))
