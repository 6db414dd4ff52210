"""The local families brought to arrays: what setups of one workload on one arrangement share and nobody else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .arrays import BoolArray, FloatArray, IntArray
from .effects import LOCAL, bell, terms
from .features import Features
from .keys import Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """Setups as the local families see them.

    (families, rows) codes of their keys, and weights times the root of the variance; (families,) `by_batch` says which
    look at the (rows,) `batch` too.
    """

    codes: IntArray
    weight: FloatArray
    by_batch: BoolArray
    batch: FloatArray

    @classmethod
    def of(cls, features: Features, variances: Mapping[str, float], tables: Mapping[str, Keys] | None = None) -> Local:
        """By each family's table in `tables`, so that codes compare with another's; -1 for a key that is not in it."""
        told = terms(features)
        codes = [told[name].keys.within(tables[name]) if tables else told[name].keys.codes for name in LOCAL]
        return cls(
            codes=np.stack(codes),
            weight=np.stack([np.sqrt(variances[name]) * told[name].weight for name in LOCAL]),
            by_batch=np.array([told[name].batch for name in LOCAL]),
            batch=features.batch,
        )

    @staticmethod
    def tables(features: Features) -> dict[str, Keys]:
        """Each family's keys, to compare others' by."""
        told = terms(features)
        return {name: told[name].keys for name in LOCAL}

    @property
    def variance(self) -> FloatArray:
        """(rows,) of all families together."""
        return np.asarray((self.weight**2).sum(axis=0), dtype=float)

    def take(self, picked: IntArray) -> Local:
        """The rows at these positions."""
        return Local(
            codes=self.codes[:, picked],
            weight=self.weight[:, picked],
            by_batch=self.by_batch,
            batch=self.batch[picked],
        )

    def covariance(self, other: Local) -> FloatArray:
        """(rows, others) of all families together."""
        near = bell(self.batch[:, None], other.batch[:, None])
        total = np.zeros(near.shape)
        for at, by_batch in enumerate(self.by_batch):
            found = self.weight[at, :, None] * other.weight[at, None, :]
            found *= self.codes[at, :, None] == other.codes[at, None, :]
            total += found * near if by_batch else found
        return total
