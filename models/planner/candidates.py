"""Enumerate the candidates of a workload: combinations of a batch split, a market and a zone.

A batch split is the number of samples that each device of a cluster gets. `without_beaten_zones`
leaves out zones that are unlikely to have the best cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..domain.cluster import Offer, Pool
from ..domain.numeric import FloatArray, IntArray
from ..domain.optimizer_state import checkpoint_bytes
from ..domain.workload import Mode, Setup, Workload
from ..job.duration import Conditions, expected_hours
from ..job.job_conditions import STATED, JobConditions
from ..step_time.model import StepTimeModel
from .batch_split import OBSTACLES, BatchSplits, global_batches, splits_of
from .enumeration import MOST_MIXED, Refusal, compositions, price_or_inf, sold_together, zone_of

# All instance types are compared in at most this many zones of each market, because planning time
# grows with each zone.
MOST_ZONES = 4


@dataclass(frozen=True, kw_only=True)
class Supply:
    """The clusters that can be chosen: combinations of up to `max_hosts` machines from `offers`.

    - `fits(cluster)` returns "" if the cluster can be launched, else the reason why it cannot.
    - `job_conditions` has the start-up, checkpoint and interruption models.
    - `vetoes` has the modes (precision, strategy, switches) that must not be chosen, as
      {mode: reason}.
    - `most_mixed` limits the number of clusters if there are many instance types. Some mixed
      clusters are then left out (see `compositions`), but all clusters of a single type remain.
    """

    offers: Sequence[Offer]
    max_hosts: int
    fits: Refusal
    job_conditions: JobConditions = STATED
    vetoes: Mapping[Mode, str] = field(default_factory=dict)
    most_mixed: int = MOST_MIXED


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The candidates of a workload.

    `frame` has a row per candidate, with these columns:

        split, zone, condition   positions in `splits`, `zones` and `conditions`
        cluster                  a number that is equal for candidates with the same machines in the
                                 same market and zone
        usd_per_hour             price of all machines with storage and other costs; NaN if unknown
        start_usd                cost of the data that all machines download when the job starts

    Some candidates have clusters that cannot be launched. `setups(rows, fits)` skips them.

    - `splits`: the batch splits, which say how many samples each device gets
    - `zones`: for each market and zone, the offers as {instance type: offer}
    - `conditions`: the start-up, checkpoint and interruption parameters of clusters
    - `compile_s`: (modes,) seconds of compilation before the first step
    - `left_out`: the number of clusters without a candidate, as {reason: number}
    """

    splits: BatchSplits
    zones: tuple[Mapping[str, Offer], ...]
    frame: pd.DataFrame
    conditions: Conditions
    compile_s: FloatArray
    left_out: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.frame)

    def compared(self) -> str:
        """Return a phrase such as `112 clusters (left out: 2 with too little memory)`."""
        unpriced = self.frame.loc[self.frame["usd_per_hour"].isna(), "cluster"].nunique()
        left_out = {**self.left_out, "without a price": unpriced}
        left = ", ".join(f"{count:,} {why}" for why, count in left_out.items() if count)
        clusters = f"{self.frame['cluster'].nunique() - unpriced:,} clusters"
        return f"{clusters} (left out: {left})" if left else clusters

    def column(self, name: str, rows: IntArray | slice = slice(None)) -> NDArray[Any]:
        return self.frame[name].to_numpy()[rows]

    def setups(self, rows: IntArray, fits: Refusal = lambda _: "") -> Iterator[Setup]:
        """Yield the candidates at positions `rows` as setups, if their cluster can be launched.

        `fits(cluster)` returns "" if the cluster can be launched, else the reason why it cannot.
        By default, no candidate is skipped.
        """
        columns = (self.column(name, rows).tolist() for name in ("split", "zone"))
        for split, zone in zip(*columns, strict=True):
            setup = self.splits.setup(split, self.zones[zone])
            if not fits(setup.cluster):
                yield setup

    def by_price(self) -> IntArray:
        """Return the positions of all candidates, sorted by dollars per hour.

        Candidates with an unknown price come last.
        """
        return np.argsort(self.column("usd_per_hour").round(9), kind="stable")

    def with_hours(self, step_s: FloatArray, samples: int) -> Candidates:
        """Return the candidates with two more columns: expected `hours` and `usd` of the whole job.

        `step_s` has the predicted seconds per step of each batch split. `samples` is the number of
        samples to train on in the whole job.
        """
        split = self.column("split")
        steps = -(-samples // self.splits.total)
        later_s = self.compile_s[self.splits.mode][split]
        conditions = self.conditions.take(self.column("condition")).later(later_s)
        hours = expected_hours((step_s * steps / 3600)[split], conditions)
        start_usd = self.frame["start_usd"]
        frame = self.frame.assign(hours=hours, usd=hours * self.frame["usd_per_hour"] + start_usd)
        return replace(self, frame=frame)


def enumerate_candidates(workload: Workload, supply: Supply, model: StepTimeModel) -> Candidates:
    """Return a candidate for each batch split in each market and zone that sells the machines."""
    zones = tuple(sold_together(supply.offers))
    known = {name: offer.instance_type for zone in zones for name, offer in zone.items()}
    types = [known[name] for name in sorted(known)]
    counts = compositions(len(types), max_hosts=supply.max_hosts, most_mixed=supply.most_mixed)
    totals = global_batches(workload.global_batch_least, workload.global_batch_most)
    splits = splits_of(workload, types, counts, totals=totals, model=model)
    state_bytes = checkpoint_bytes(workload.gradient_bytes, workload.checkpoint_bytes)
    frames, conditions, first = [], [], 0
    left_out = np.zeros(len(OBSTACLES), np.intp)
    for number, zone in enumerate(zones):
        sells = np.array([instance_type.name in zone for instance_type in types])
        sold = (counts[:, ~sells] == 0).all(axis=1)
        obstacle = splits.obstacle[sold & (splits.obstacle >= 0)]
        left_out += np.bincount(obstacle, minlength=len(OBSTACLES))
        rows = np.flatnonzero(sold[splits.cluster])
        clusters, back = np.unique(splits.cluster[rows], return_inverse=True)
        bought = counts[np.ix_(clusters, sells)]
        offers = list(zone.values())
        prices = np.array([offer.total_usd_per_hour for offer in offers], float)
        usd = np.where(bought > 0, bought * prices, 0.0).sum(axis=1)
        start_usd = bought @ np.array([offer.start_usd for offer in offers], float)
        columns = {
            "split": rows,
            "zone": number,
            "cluster": number * len(counts) + splits.cluster[rows],
            "condition": first + back,
            "usd_per_hour": usd[back],
            "start_usd": start_usd[back],
        }
        frames.append(pd.DataFrame(columns))
        pools = [Pool.of(offer) for offer in offers]
        conditions.append(supply.job_conditions.gangs(pools, bought, state_bytes))
        first += len(clusters)
    compile_s = [supply.job_conditions.compile_s(workload.name, mode) for mode in splits.modes]
    return Candidates(
        splits=splits,
        zones=zones,
        frame=pd.concat(frames, ignore_index=True),
        conditions=Conditions.joined(conditions),
        compile_s=np.array(compile_s),
        left_out=dict(zip(OBSTACLES, left_out.tolist(), strict=True)),
    )


def without_beaten_zones(offers: Sequence[Offer]) -> list[Offer]:
    """Return the offers without those that are unlikely to be best, in unchanged order.

    For each market and instance type, one or two offers are winners: the offer with the lowest
    price per hour, and the offer with the cheapest downloads at the start. In each market, the four
    zones with the most winners (MOST_ZONES) keep all their offers. The remaining zones keep only
    their winners. Published interruption rates are not compared. They differ so little that prices
    matter more.
    """
    by_price = sorted(
        offers, key=lambda offer: (price_or_inf(offer), offer.start_usd, zone_of(offer))
    )
    by_start = sorted(
        offers, key=lambda offer: (offer.start_usd, price_or_inf(offer), zone_of(offer))
    )
    best: set[Offer] = set()
    for ordered in (by_price, by_start):
        first: dict[tuple[str, str], Offer] = {}
        for offer in ordered:
            first.setdefault((offer.market, offer.instance_type.name), offer)
        best.update(first.values())
    wins = Counter(map(zone_of, best))
    zones = sorted(wins, key=lambda at: (at[0], -wins[at], at))
    by_market = groupby(zones, key=itemgetter(0))
    whole = {zone for _, group in by_market for zone in islice(group, MOST_ZONES)}
    return [offer for offer in offers if offer in best or zone_of(offer) in whole]
