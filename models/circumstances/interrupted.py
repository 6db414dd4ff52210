"""One job's hours when the moments of its interruptions are known, and how far apart checkpoints should be.

    I = sqrt(2 c M) (1 + sqrt(c / 2M) / 3 + c / 18M) - c,  M where c >= 2M        Daly [P], beyond Young's first term

A job is n equal pieces of work with a checkpoint of c between each two. An interruption takes what was done since the
last whole checkpoint, and then a replacement; one that comes while machines are being replaced starts that anew.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_LEAST_HAZARD = 1e-12  # an hour: rarer than that is never


def best_interval(checkpoint_hours: ArrayLike, hazard_per_hour: ArrayLike) -> Floats:
    """Hours of work between two checkpoints (Daly [P]), in the broadcast shape; very long where nothing interrupts."""
    mean = 1 / np.maximum(np.asarray(hazard_per_hour, dtype=float), _LEAST_HAZARD)
    cost = np.asarray(checkpoint_hours, dtype=float)
    ratio = np.minimum(cost / (2 * mean), 1.0)
    interval = np.sqrt(2 * cost * mean) * (1 + np.sqrt(ratio) / 3 + ratio / 9) - cost
    return np.asarray(np.where(cost < 2 * mean, interval, mean), dtype=float)


def pieces(work_hours: ArrayLike, interval_hours: ArrayLike) -> Floats:
    """Whole numbers of pieces between checkpoints, at least 1: as few as keep each within the interval."""
    ratio = np.asarray(work_hours, dtype=float) / np.maximum(np.asarray(interval_hours, dtype=float), 1e-9)
    return np.asarray(np.maximum(np.ceil(ratio - 1e-9), 1.0), dtype=float)


def hours_given(
    interruptions: Iterable[float],
    *,
    work_hours: float,
    interval_hours: float,
    startup_hours: float,
    checkpoint_hours: float,
    replacement_hours: float,
) -> float:
    """Hours from asking for the machines to the end of the work, the moments of `interruptions` being known.

    Moments are hours since the machines were asked for, in any order; those after the end do nothing. During start-up
    an interruption starts it anew. Every `interval_hours` of work a checkpoint is written; there is none after the last
    piece. `replacement_hours` is from an interruption to work going on: new machines, and the checkpoint read back.
    """
    count = int(pieces(work_hours, interval_hours))
    piece = work_hours / count
    done, working_from, started = 0, startup_hours, False

    def end() -> float:
        left = count - done
        return working_from + left * piece + max(left - 1, 0) * checkpoint_hours

    for moment in sorted(interruptions):
        if moment < 0 or moment >= end():
            continue
        if moment < working_from:
            working_from = moment + (replacement_hours if started else startup_hours)
            continue
        # a millionth of a second early still counts as written: sums of floats, not physics
        done += int((moment - working_from + 1e-10) // (piece + checkpoint_hours))
        working_from, started = moment + replacement_hours, True
    return end()
