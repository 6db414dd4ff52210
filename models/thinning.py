"""Which setups to learn from where more were measured than are taken: evenly by workload, then by what ran on what.

A workload keeps min(its setups, cap), with the largest cap that keeps the total. By chance alone a small workload, a
pilot run or a rare instance type would vanish among a million setups of something else.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from .arrays import IntArray


def thinned(setups: pd.DataFrame, *, most: int, seed: int) -> IntArray:
    """Positions of at most `most` setups, ascending: of all where there are no more.

    `setups` has workload, cluster and layout, the machines in one order. More than `most` workloads keep one setup
    each. Of a workload that is thinned, setups of one device come first, up to half of its share, since all others
    start from what these say. Instance types take turns, and so do the arrangements of the same types.
    """
    if len(setups) <= most:
        return np.arange(len(setups))
    chance = np.random.default_rng(seed).permutation(len(setups))
    workload, cluster, layout = (pd.factorize(setups[name]) for name in ("workload", "cluster", "layout"))
    alone = (np.asarray(layout[1]) == "1")[layout[0]].astype(np.intp)
    types = pd.factorize(np.array([_types(one) for one in cluster[1]], dtype=object))[0][cluster[0]]
    kind = _numbered(workload[0], alone, types)
    turn = _places(kind, _places(_numbered(kind, cluster[0], layout[0]), chance), chance)
    cap = _cap(np.bincount(workload[0]), most)
    early = _places(_numbered(workload[0], alone), turn, chance) < max(cap // 2, 1)
    rank = np.where(alone == 0, 1, np.where(early, 0, 2))  # more of one device only where nothing else is left
    return np.flatnonzero(_places(workload[0], rank, turn, chance) < cap)


def _cap(counts: IntArray, most: int) -> int:
    """The largest number of setups that each workload may keep, at least 1, for all to keep `most`, below their sum."""
    ascending = np.sort(counts)
    before = np.cumsum(ascending) - ascending
    caps = (most - before) // np.arange(len(counts), 0, -1)  # where this one is cut, and all that have more
    return max(int(caps[np.flatnonzero(caps < ascending)[0]]), 1)


def _places(group: IntArray, *keys: IntArray) -> IntArray:
    """(rows,) how many rows of the same group come before each, by the first key, ties by the next."""
    order = np.lexsort((*keys[::-1], group))
    sizes = np.bincount(group)
    starts = np.cumsum(sizes) - sizes
    places = np.empty(len(group), dtype=np.intp)
    places[order] = np.arange(len(group)) - starts[group[order]]
    return places


def _numbered(*codes: IntArray) -> IntArray:
    """(rows,) one number for each combination that some row has, from 0."""
    left, *others = codes
    for right in others:
        left = np.unique(left * (right.max() + 1) + right, return_inverse=True)[1]
    return left


def _types(cluster: str) -> str:
    """Instance types whatever the number of machines: `a+b` of `2xa+1xb`."""
    return "+".join(sorted({part.split("x", 1)[-1] for part in cluster.split("+")}))
