"""How near is the nearest measurement of the same workload, in doublings.

distance = |log2 batch ratio| + |log2 devices ratio| + |log2 machines ratio| + |log2 accumulation ratio|
           + 1 for each instance type that only one of the two has
"""

from __future__ import annotations

import numpy as np
from scipy.spatial import KDTree

from .setups import FloatArray, SetupArrays


class Nearness:
    """Measured setups by workload, asked for their distance to others."""

    def __init__(self, measured: SetupArrays) -> None:
        """One tree a workload; the distance is Manhattan's over `_places`."""
        self._types = {name: at for at, name in enumerate(sorted({one for row in measured.types for one in row}))}
        places = self._places(measured)
        self._trees = {
            name: KDTree(places[np.flatnonzero(np.array(measured.workloads) == name)])
            for name in sorted(set(measured.workloads))
        }

    def doublings(self, setups: SetupArrays) -> FloatArray:
        """(rows,) distance to the nearest measured setup of the workload: 0 where it was measured itself, NaN where
        nothing of the workload was."""
        found = np.full(len(setups.workloads), np.nan)
        places, names = self._places(setups), np.array(setups.workloads)
        for name, tree in self._trees.items():
            own = np.flatnonzero(names == name)
            if len(own):
                found[own] = tree.query(places[own], p=1)[0]
        return found

    def _places(self, setups: SetupArrays) -> FloatArray:
        """(rows, 5 + types): the last before the types counts types that were never measured at all."""
        ranks = np.maximum(setups.ranks, 1)
        batch = setups.samples / setups.accumulation / ranks
        numbers = np.log2([batch, ranks, np.maximum(setups.instances, 1), setups.accumulation])
        kinds = np.zeros((len(setups.workloads), 1 + len(self._types)))
        for row, types in enumerate(setups.types):
            for name in set(types):
                if name in self._types:
                    kinds[row, 1 + self._types[name]] = 1
                else:
                    kinds[row, 0] += 1
        return np.hstack([numbers.T, kinds])
