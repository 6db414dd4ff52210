"""How near is the nearest measurement of the same workload, in doublings.

distance = |log2 batch ratio| + |log2 devices ratio| + |log2 machines ratio| + |log2 accumulation ratio|
           + 1 for each instance type that only one of the two has
"""

from __future__ import annotations

import numpy as np
from scipy.spatial import KDTree

from .arrays import FloatArray
from .setups import SetupArrays


class Nearness:
    """Measured setups by workload, asked for their distance to others."""

    def __init__(self, measured: SetupArrays) -> None:
        """One tree a workload; the distance is Manhattan's over `_places`."""
        self._types = {name: at for at, name in enumerate(sorted(measured.met_types))}
        places = self._places(measured)
        self._trees = {name: KDTree(places[rows]) for name, rows in sorted(measured.workloads.groups().items())}

    def doublings(self, setups: SetupArrays) -> FloatArray:
        """(rows,) distance to the nearest measured setup of the workload: 0 where it was measured itself, NaN where
        nothing of the workload was."""
        found = np.full(len(setups.workloads), np.nan)
        places = self._places(setups)
        for name, own in setups.workloads.groups().items():
            if name in self._trees:
                found[own] = self._trees[name].query(places[own], p=1)[0]
        return found

    def _places(self, setups: SetupArrays) -> FloatArray:
        """(rows, 5 + types): the last before the types counts types that were never measured at all."""
        ranks = np.maximum(setups.ranks, 1)
        batch = setups.samples / setups.accumulation / ranks
        numbers = np.log2([batch, ranks, np.maximum(setups.instances, 1), setups.accumulation])
        kinds = np.zeros((len(setups.workloads), 1 + len(self._types)))
        for at, name in enumerate(setups.names):
            there = (setups.kind == at).any(axis=1)
            if name in self._types:
                kinds[there, 1 + self._types[name]] = 1
            else:
                kinds[there, 0] += 1
        return np.hstack([numbers.T, kinds])
