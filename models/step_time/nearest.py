"""Compute the distance to the nearest measurement of the same workload, in doublings.

distance = |log2 batch ratio| + |log2 devices ratio| + |log2 machines ratio|
           + |log2 accumulation ratio|
           + sum over instance types of |difference of log2(1 + share)|
           + |difference of unevenness of the batches|
           + |difference of unevenness of the devices per machine|

The share of an instance type is the mean of its share of all devices and its share of all samples.
The unevenness of values is the mean, for all machines, of |log2(value / mean value)|.
"""

from __future__ import annotations

import numpy as np
from pandas.util import hash_array
from scipy.spatial import KDTree

from ..domain.numeric import FloatArray
from .setup_arrays import SetupArrays

Marks = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]

# Least distance of an unmeasured setup: different setups may have a computed distance of 0.
_LEAST = 0.1


class Nearness:
    """An index of the measured setups. Each workload has a KD-tree with Manhattan distances."""

    def __init__(self, measured: SetupArrays) -> None:
        self._types = {name: at for at, name in enumerate(sorted(measured.type_names), start=1)}
        places, marks = self._places(measured), self._marks(measured)
        self._trees, self._measured = {}, {}
        for workload, mode, rows in measured.groups():
            self._trees[workload, mode] = KDTree(places[rows])
            self._measured[workload, mode] = np.unique(marks[rows])

    def doublings(self, setups: SetupArrays) -> FloatArray:
        """Return a (rows,) array: the distance of each setup to the nearest measured setup.

        The unit is doublings. A measured setup has distance 0, any other setup at least 0.1. The
        distance is NaN if the workload has no measured setup. The order of machines does not
        matter.
        """
        found = np.full(len(setups.workloads), np.nan)
        places, marks = self._places(setups), self._marks(setups)
        for workload, mode, rows in setups.groups():
            if (workload, mode) in self._trees:
                tree, measured = self._trees[workload, mode], self._measured[workload, mode]
                distance = np.maximum(tree.query(places[rows], p=1)[0], _LEAST)
                found[rows] = np.where(np.isin(marks[rows], measured), 0.0, distance)
        return found

    def _places(self, setups: SetupArrays) -> FloatArray:
        """Return a (rows, 7 + types) array: the coordinates of the setups.

        The first 6 columns are numbers and unevenness. The next column is the share of all
        unmeasured instance types together, and each further column that of a measured type.
        """
        count, ranks, instances = (
            setups.count,
            np.maximum(setups.ranks, 1),
            np.maximum(setups.instances, 1),
        )
        devices = count * setups.layout
        batch = setups.samples / setups.accumulation / ranks
        numbers = np.log2([batch, ranks, instances, setups.accumulation])
        uneven = [
            (
                count
                * np.abs(np.log2(np.where(setups.present, one, middle[:, None]) / middle[:, None]))
            ).sum(axis=1)
            for one, middle in ((setups.batch, batch), (setups.layout, ranks / instances))
        ]
        part = (devices + devices * setups.batch / batch[:, None]) / 2 / ranks[:, None]
        kinds = np.zeros((len(batch), 1 + len(self._types)))
        for at, name in enumerate(setups.names):
            kinds[:, self._types.get(name, 0)] += np.log2(
                1 + np.where(setups.kind == at, part, 0.0).sum(axis=1)
            )
        return np.hstack([numbers.T, (np.array(uneven) / instances).T, kinds])

    def _marks(self, setups: SetupArrays) -> Marks:
        """Return a (rows,) array: a hash of each setup's machines and accumulation steps.

        The order of machines does not change the hash. All unmeasured types have the same hash,
        because no setup with such a type was measured.
        """
        known = np.array(
            [self._types.get(name, 0) for name in setups.names] + [0], dtype=np.uint64
        )[setups.kind]
        machine = _mixed(_mixed(_mixed(known) + _bits(setups.layout)) + _bits(setups.batch))
        whole = np.where(
            setups.present, setups.count.astype(np.uint64) * machine, np.uint64(0)
        ).sum(axis=1)
        return _mixed(whole + _bits(setups.accumulation))


def _bits(numbers: FloatArray) -> Marks:
    return np.ascontiguousarray(numbers, dtype=np.float64).view(np.uint64)


def _mixed(numbers: Marks) -> Marks:
    """Return the hash of each number."""
    return np.asarray(hash_array(numbers.ravel()), dtype=np.uint64).reshape(numbers.shape)
