"""Normal draws by name: equal names draw equal numbers, in whatever company they are asked for. No global random."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

from .arrays import FloatArray
from .effects import LOCAL, terms
from .features import Features
from .keys import Keys


def keyed_normals(seed: int, family: str, keys: Keys, count: int) -> FloatArray:
    """(keys, count) standard normals; rows of equal keys are equal, rows of different keys independent."""
    drawn = np.empty((len(keys.names), count))
    for code in keys.met:
        drawn[code] = _generator(seed, family, keys.names[code]).standard_normal(count)
    return drawn[keys.codes]


def local_draws(at: Features, variances: Mapping[str, float], count: int, *, seed: int) -> FloatArray:
    """(setups, count) of what only neighbours share, before any measurement.

    A family that looks at the batch too is a wave of a random frequency, cos(w b) u + sin(w b) v with w, u and v
    normal: its covariance over batches b is exactly exp(-(b - b')^2 / 2), and it is the same curve whichever b are
    asked for.
    """
    told = terms(at)
    total = np.zeros((len(at.exposed), count))
    for name in LOCAL:
        term, scale = told[name], np.sqrt(variances[name])
        used = np.flatnonzero(term.weight)
        if not len(used):
            continue
        value = keyed_normals(seed, name, term.keys.take(used), 3 * count if term.batch else count)
        if term.batch:
            angle = value[:, 2 * count :] * at.batch[used, None]
            value = np.cos(angle) * value[:, :count] + np.sin(angle) * value[:, count : 2 * count]
        total[used] += scale * term.weight[used, None] * value
    return total


def _generator(seed: int, family: str, key: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(f"{family}|{key}".encode())])
