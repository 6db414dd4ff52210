"""Columns of the regression for any setups: parameters, one column a key of each linear family, the smooth families.

Smooth families enter by a pivoted Cholesky factor of their covariance on the training setups; what it leaves out
belongs to each setup alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from scipy.linalg import solve_triangular

from .arrays import FloatArray, IntArray
from .effects import LINEAR, SMOOTH, UNCHECKED, Term, covariance, each_with_all, terms
from .features import Features
from .keys import Keys

# Keys of one family that have a column: those met most often; what the others share is left to each alone.
_MOST_KEYS = 400
# Most columns that stand for the smooth families, and the variance that they may leave out.
_MOST_SMOOTH, _LEFT_OUT = 300, 4e-6


class Basis:
    """Columns of Phi for any setups: parameters, one column a key of each linear family, pivots of the smooth ones."""

    def __init__(self, features: Features, variances: dict[str, float]) -> None:
        self._variances = variances
        told = terms(features)
        # in this order, so that the first columns of a whitener are what is unsure of these, all else being known
        names = (*UNCHECKED, *(name for name in LINEAR if name not in UNCHECKED))
        self._keys = {name: _places(told[name]) for name in names}
        self._pivots, factor = self._pivot(features)
        # the inverse once: products are several times as quick as solving for thousands of setups
        self._whitener = solve_triangular(factor, np.eye(len(factor)), lower=True).T

    @property
    def unchecked(self) -> int:
        """How many columns, the first, are of families whose doubts no group that is left out can check."""
        return sum(len(self._keys[name]) for name in UNCHECKED)

    def at(self, features: Features) -> tuple[FloatArray, FloatArray]:
        """(rows, columns) of Phi, and the (rows,) variance that belongs to each setup alone."""
        told = terms(features)
        alone = np.zeros(len(features.exposed))
        columns: list[FloatArray] = []
        for name, known in self._keys.items():
            term = told[name]
            block = np.zeros((len(alone), len(known)))
            place = term.keys.places(known)
            met = np.flatnonzero(place >= 0)
            scale = np.sqrt(self._variances[name])
            block[met, place[met]] = scale * term.weight[met]
            alone[place < 0] += (scale * term.weight[place < 0]) ** 2
            columns.append(block)
        columns.append(features.shared)
        if self._pivots is not None:
            smooth = covariance(SMOOTH, self._variances, features, self._pivots) @ self._whitener
            alone += np.maximum(self._smooth_diagonal(told) - (smooth**2).sum(axis=1), 0)
            columns.append(smooth)
        else:
            alone += self._smooth_diagonal(told)
        return np.concatenate(columns, axis=1), alone

    def unmet(self, features: Features) -> Iterator[tuple[str, IntArray, Keys, FloatArray]]:
        """Family by family the rows whose key nobody has measured, their keys and weights.

        Such an effect is as unknown as before, but shared by all rows of its key.
        """
        told = terms(features)
        for name, known in self._keys.items():
            term = told[name]
            picked = np.flatnonzero((term.keys.places(known) < 0) & (term.weight != 0))
            if len(picked):
                yield name, picked, term.keys.take(picked), np.sqrt(self._variances[name]) * term.weight[picked]

    def _smooth_diagonal(self, told: dict[str, Term]) -> FloatArray:
        parts = [self._variances[name] * told[name].weight ** 2 for name in SMOOTH]
        return np.asarray(np.sum(parts, axis=0), dtype=float)

    def _pivot(self, features: Features) -> tuple[Features | None, FloatArray]:
        """Training setups that span the smooth families best, by pivoted Cholesky, and their factor."""
        left, across = self._smooth_diagonal(terms(features)), each_with_all(SMOOTH, self._variances, features)
        most = min(_MOST_SMOOTH, len(left))
        rows, chosen = np.zeros((most, len(left))), []
        for at in range(most):
            best = int(np.argmax(left))
            if left[best] < _LEFT_OUT:
                break
            rows[at] = (across(best) - rows[:at, best] @ rows[:at]) / np.sqrt(left[best])
            left = np.maximum(left - rows[at] ** 2, 0)
            chosen.append(best)
        if not chosen:
            return None, np.zeros((0, 0))
        pivots = features.take(np.array(chosen))
        return pivots, cholesky(covariance(SMOOTH, self._variances, pivots, pivots) + 1e-10 * np.eye(len(chosen)))


def _places(term: Term) -> dict[str, int]:
    """Column of each key: also of one that no setup answers to yet, since its later setups share what they err by."""
    times = np.bincount(term.keys.codes, minlength=len(term.keys.names)).tolist()
    met = Counter({name: many for name, many in zip(term.keys.names, times, strict=True) if many})
    kept = sorted(key for key, _ in met.most_common(_MOST_KEYS))
    return {key: at for at, key in enumerate(kept)}


def cholesky(covariance: FloatArray) -> FloatArray:
    """Lower factor."""
    return np.asarray(np.linalg.cholesky(covariance), dtype=float)
