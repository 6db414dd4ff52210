"""Compute the distance to the nearest measurement of the same workload, in doublings.

The distance of a setup from a measured setup is this sum:

    distance = |log2 ratio of batches| + |log2 ratio of devices| + |log2 ratio of machines|
               + |log2 ratio of accumulation steps|
               + sum over instance types of |difference of log2(1 + share)|
               + |difference of unevenness of the batches|
               + |difference of unevenness of the devices per machine|

A distance of 1 is a doubling: for example, twice as many devices. The share of an instance type is
the mean of two fractions: its devices / all devices, and its samples / all samples. The unevenness
of a value is the mean over all machines of |log2(value / mean value)|.
"""

import numpy as np
from scipy.spatial import KDTree

from ..domain.numeric import FloatArray
from .setup_arrays import SetupArrays

# Minimum distance of a setup that differs from all measured setups; rounding error of distances.
_LEAST, _ROUNDING = 0.1, 1e-9


def doublings(measured: SetupArrays, setups: SetupArrays) -> FloatArray:
    """Return a (rows,) array: the distance of each of `setups` to the nearest setup in `measured`.

    The unit of the distance is a doubling, for example of the batch or the number of devices. Only
    setups with the same workload and mode (precision, strategy, switches) are compared. The
    distance is NaN if there is no such setup in `measured`. It is 0 for a measured setup, and at
    least 0.1 for any other setup.
    """
    types = sorted(measured.type_names)
    found, places = np.full(len(setups.workload), np.nan), _places(setups, types)
    known = {(workload, mode): rows for workload, mode, rows in measured.groups()}
    known_places = _places(measured, types)
    for workload, mode, rows in setups.groups():
        if (workload, mode) in known:
            tree = KDTree(known_places[known[workload, mode]])
            distance = tree.query(places[rows], p=1)[0]
            found[rows] = np.where(distance > _ROUNDING, np.maximum(distance, _LEAST), 0.0)
    return found


def _places(setups: SetupArrays, types: list[str]) -> FloatArray:
    """Return a (rows, 7 + len(types)) array: the coordinates of the setups.

    The distance of two setups is the sum of the absolute differences of their coordinates. The
    docstring of the module defines share and unevenness. The columns are:

    1. log2 of the batch per device
    2. log2 of the number of devices
    3. log2 of the number of machines
    4. log2 of the number of accumulation steps
    5. unevenness of the batches
    6. unevenness of the devices per machine
    7. sum of log2(1 + share) over all instance types that are not in `types`
    8. and later: log2(1 + share) of each type in `types`
    """
    ranks, instances = setups.ranks, setups.instances
    batch = setups.samples / setups.accumulation / ranks
    numbers = np.log2([batch, ranks, instances, setups.accumulation])
    uneven = []
    for values, mean in ((setups.batch, batch), (setups.layout, ranks / instances)):
        ratio = np.where(setups.present, values / mean[:, None], 1.0)
        uneven.append((setups.count * abs(np.log2(ratio))).sum(axis=1) / instances)
    devices = setups.count * setups.layout
    use = devices * (1 + setups.batch / batch[:, None]) / 2 / ranks[:, None]
    kinds = np.zeros((len(batch), 1 + len(types)))
    for at, name in enumerate(setups.names):
        share = (use * (setups.kind == at)).sum(axis=1)
        kinds[:, types.index(name) + 1 if name in types else 0] += np.log2(1 + share)
    return np.column_stack([*numbers, *uneven, kinds])
