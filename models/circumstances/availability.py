"""Whether n machines can be had at once, and how long one waits for it. Asks for nothing.

    p_type,market ~ Beta, from own requests granted and refused        p_gang(n) = p^(1 + (n - 1) (1 - shared))

Refusals for lack of capacity bunch as interruptions do: where one machine can be had, the next is likelier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Floats = NDArray[np.float64]

Pool = tuple[str, str, str]  # instance type, market, zone

# Before anybody asked: granted so many times in ten, worth so many requests. A guess: no public figures by type exist.
_GRANTED, _WEIGHT = {"on-demand": 0.97, "spot": 0.85}, 5.0
_SHARED = 0.7  # of a refusal's cause that all machines of a pool have in common; a guess of the same kind


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailabilityModel:
    """Chance that a request for one machine is granted, by type, market and zone."""

    granted: Mapping[Pool, float]

    def one(self, pool: Pool) -> float:
        """Chance that one machine can be had. Raises ValueError for a market that is neither on-demand nor spot."""
        if pool[1] not in _GRANTED:
            raise ValueError(f"market {pool[1]!r} is none of {', '.join(_GRANTED)}")
        return self.granted.get(pool, _GRANTED[pool[1]])

    def gang(self, machines: Iterable[Pool]) -> float:
        """Chance that all `machines` can be had at once: pools are independent, machines of one pool are not."""
        asked = list(machines)
        pools = list(dict.fromkeys(asked))
        return float(self.gangs(pools, np.array([[asked.count(pool) for pool in pools]], dtype=float))[0])

    def gangs(self, pools: Sequence[Pool], counts: Floats) -> Floats:
        """(gangs,) the same of `counts` (gangs, pools) machines."""
        logs = np.log(np.array([self.one(pool) for pool in pools], dtype=float))
        often = np.where(counts > 0, 1 + (counts - 1) * (1 - _SHARED), 0.0)
        return np.asarray(np.exp(often @ logs), dtype=float)

    def wait_s(self, machines: Iterable[Pool], *, retry_s: float) -> float:
        """Expected seconds before the gang is granted, asking every `retry_s`: refusals before the first success."""
        chance = self.gang(machines)
        return retry_s * (1 - chance) / chance


def fit_availability(requests: pd.DataFrame) -> AvailabilityModel:
    """Learned from `requests`: instance_type, market, zone, granted (bool), one row a machine asked for."""
    found: dict[Pool, float] = {}
    for (kind, market, zone), rows in requests.groupby(["instance_type", "market", "zone"]):
        prior = _WEIGHT * _GRANTED[str(market)]
        found[str(kind), str(market), str(zone)] = (prior + float(rows["granted"].sum())) / (_WEIGHT + len(rows))
    return AvailabilityModel(granted=found)
