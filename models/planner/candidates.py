"""Every candidate: batch splits x zones x markets, each with its price and what interrupts it.

A purchase option is a market in a zone, or two markets there. A cluster that loses a machine waits for another, so
machines on demand among spot ones lower how often that happens and raise the price: of one type, one machine or half of
them may be on demand. A zone whose machines another zone sells no dearer and no riskier cannot win.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..domain.cluster import ANY_ZONE, Offer
from ..domain.numeric import BoolArray, FloatArray, IntArray
from ..domain.setup_table import Key, setup_key
from ..domain.workload import Mode, Setup, Workload
from ..job.checkpoints import checkpoint_bytes
from ..job.duration import Conditions
from ..job.job_conditions import JobConditions, Pool, Stated
from .batch_split import BatchSplits, StepModel, Wholes, global_batches, splits_of
from .enumeration import MOST_CLUSTERS, Refusal, compositions, price_or_inf, sold_together

_DIGITS = 9  # of dollars an hour: sums in another order differ by less


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """What clusters can be had: of up to `max_hosts` machines among `offers`, but for those that do not fit.

    `fits` says why a cluster can never be had ("" where it can); `job_conditions` what start-up, checkpoints and
    interruptions jobs meet on clusters. `vetoes` say of modes why they may not be chosen.
    """

    offers: Sequence[Offer]
    max_hosts: int
    fits: Refusal
    job_conditions: JobConditions = Stated()  # noqa: RUF009 (frozen)
    vetoes: Mapping[Mode, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """All rows that may be asked about: each a batch split under a purchase option. Arrays are (rows,) but for
    `splits` and `known_conditions`; `usd_per_hour` of the whole bill is NaN where unknown.

    `cluster` numbers the clusters with their markets and zones, `condition` their entries in `known_conditions`;
    `compiling_s` are (modes,) seconds before the first step.
    Unless `all_fit`, a cluster may not fit.
    """

    splits: BatchSplits
    options: tuple[PurchaseOption, ...]
    split: IntArray
    option: IntArray
    cluster: IntArray
    usd_per_hour: FloatArray
    condition: IntArray
    known_conditions: Conditions
    compiling_s: FloatArray
    all_fit: bool

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.split)

    def setup(self, row: int) -> Setup:
        """The row as a setup."""
        return self.splits.setup(int(self.split[row]), self.options[self.option[row]].members)

    def setups(self, rows: IntArray, fits: Refusal) -> Iterator[Setup]:
        """These rows as setups, in order, without those of clusters that cannot be had; built as they are asked for."""
        refused: dict[int, bool] = {}
        for row, cluster in zip(rows.tolist(), self.cluster[rows].tolist(), strict=True):
            if not self.all_fit and cluster not in refused:
                refused[cluster] = bool(fits(self.setup(row).cluster))
            if not refused.get(cluster):
                yield self.setup(row)

    def by_price(self, rows: IntArray) -> IntArray:
        """`rows` by dollars an hour, unknown ones last; of those that differ by rounding the first stays first."""
        return rows[np.argsort(self.usd_per_hour[rows].round(_DIGITS), kind="stable")]

    def of_keys_first(self, rows: IntArray, keys: Collection[Key]) -> IntArray:
        """`rows` with those of setups that have one of `keys` before all others."""
        mine = self._of_keys(keys)[rows]
        return np.concatenate([rows[mine], rows[~mine]])

    def _of_keys(self, keys: Collection[Key]) -> BoolArray:
        """(rows,) whether a row's setup has one of these keys: no more setups are built than have such machines."""
        # equal machines have equal sums of random weights, and others hardly ever: then the key tells
        named = {one.name: at for at, one in enumerate(self.splits.types)}
        weight = np.random.default_rng(0).integers(1, 2**40, len(named) + 1)
        weight[-1] = 0  # padded
        marks = [
            sum(int(weight[named.get(name, -1)]) for name, *_ in machines)
            for _, _, machines, _ in keys
        ]
        alike = np.isin((weight[self.splits.kind] * self.splits.count).sum(axis=1), marks)
        rows = np.flatnonzero(alike[self.split])
        _, first, back = np.unique(self.split[rows], return_index=True, return_inverse=True)
        known = np.array(
            [setup_key(self.setup(row)) in keys for row in rows[first].tolist()], dtype=bool
        )
        found = np.zeros(len(self), dtype=bool)
        found[rows] = known[back]
        return found

    def cheapest_of_each(
        self, devices: Collection[str], rows: IntArray, fits: Refusal
    ) -> list[Setup]:
        """Of `rows` the cheapest on each of these devices alone that can be had, by dollars an hour."""
        places = {device: at for at, device in enumerate(sorted(set(devices)))}
        code = np.array([places.get(one.device, -1) for one in self.splits.types] + [-1])[
            self.splits.kind
        ]
        alone = ((code == code[:, :1]) | (self.splits.kind < 0)).all(axis=1)
        kind = np.where(alone, code[:, 0], -1)[self.split]
        left, cheapest = self.by_price(rows[kind[rows] >= 0]), []
        while len(left):
            had = list(self.setups(left[:1], fits))
            cheapest += had
            done = (
                kind[left] == kind[left[0]] if had else self.cluster[left] == self.cluster[left[0]]
            )
            left = left[~done]
        return cheapest

    @property
    def machines(self) -> IntArray:
        """(rows,) machines of each row's cluster."""
        return np.asarray(self.splits.count.sum(axis=1)[self.split], dtype=np.intp)

    def conditions(self, rows: IntArray | slice) -> Conditions:
        """What jobs of these rows meet."""
        seconds = self.compiling_s[self.splits.mode[self.split[rows]]]
        return self.known_conditions.take(self.condition[rows]).later(seconds)


def enumerate_candidates(workload: Workload, supply: Supply, model: StepModel) -> Candidates:
    """Every split under every purchase option that sells all of its types, in the order of options and splits.

    Where there are at most MOST_CLUSTERS clusters, those that do not fit are left out; of more the search asks when it
    comes to one. Raises ValueError where the workload's range of batches is empty.
    """
    groups = sold_together(supply.offers)
    options = (*(PurchaseOption(sold=_by_name(group)) for group in groups), *mixed_options(groups))
    known = {name: one.instance_type for option in options for name, one in option.sold.items()}
    types = [known[name] for name in sorted(known)]
    counts = compositions(len(types), max_hosts=supply.max_hosts, most=MOST_CLUSTERS)
    totals = global_batches(workload.global_batch_least, workload.global_batch_most)
    splits = splits_of(workload, types, counts, totals=totals, model=model)
    all_fit = len(counts) <= MOST_CLUSTERS
    nothing = np.zeros(0, dtype=np.intp)
    columns: list[tuple[IntArray, ...]] = [(nothing,) * 4]  # split, option, cluster, condition
    prices, conditions = [np.zeros(0)], []
    first = 0
    state_bytes = checkpoint_bytes(workload.gradient_bytes, workload.checkpoint_bytes)
    for number, option in enumerate(options):
        rows = np.flatnonzero(_sells(option, splits, counts))
        if all_fit:
            rows = rows[_fitting(splits, rows, option, supply.fits)]
        used, back = np.unique(splits.cluster[rows], return_inverse=True)
        pools, bought, usd = option.bought([one.name for one in types], counts[used])
        columns.append(
            (
                rows,
                np.full(len(rows), number),
                number * len(counts) + splits.cluster[rows],
                first + back,
            )
        )
        prices.append(np.where(bought > 0, bought * usd, 0.0).sum(axis=1)[back])
        conditions.append(supply.job_conditions.gangs(pools, bought, state_bytes))
        first += len(used)
    split, at, cluster, condition = (
        np.concatenate(one).astype(np.intp) for one in zip(*columns, strict=True)
    )
    return Candidates(
        splits=splits,
        options=options,
        split=split,
        option=at,
        cluster=cluster,
        usd_per_hour=np.concatenate(prices),
        condition=condition,
        known_conditions=Conditions.joined(conditions),
        compiling_s=np.array(
            [supply.job_conditions.compilation.seconds(workload.name, one) for one in splits.modes]
        ),
        all_fit=all_fit,
    )


def _sells(option: PurchaseOption, splits: BatchSplits, counts: Wholes) -> BoolArray:
    """Which splits can be had so: the option sells all of their types, and a mixture is of one type."""
    sells = np.array([one.name in option.sold for one in splits.types] + [True], dtype=bool)
    able = sells[splits.kind].all(axis=1)
    if option.safe is not None:
        mixable = ((counts > 0).sum(axis=1) == 1) & (counts.sum(axis=1) >= option.fewest)
        able = able & mixable[splits.cluster]
    return np.asarray(able, dtype=bool)


def _fitting(
    splits: BatchSplits, rows: IntArray, option: PurchaseOption, fits: Refusal
) -> BoolArray:
    """Which of the splits at `rows` are of clusters that can be had under this option."""
    _, first, back = np.unique(splits.cluster[rows], return_index=True, return_inverse=True)
    able = [not fits(splits.setup(int(at), option.members).cluster) for at in rows[first]]
    return np.array(able, dtype=bool)[back]


@dataclass(frozen=True, slots=True, kw_only=True)
class PurchaseOption:
    """What a market in a zone sells, by type. Where there are `safe` offers, the first machines are of those.

    They are half of the machines (rounded down), or one: a mixture has at least `fewest` machines, all of one type.
    """

    sold: Mapping[str, Offer]
    safe: Mapping[str, Offer] | None = None
    half: bool = False

    @property
    def fewest(self) -> int:
        """Machines from which the mixture is one, and no other one."""
        return 1 if self.safe is None else 4 if self.half else 2

    def members(self, name: str, count: int) -> list[Offer]:
        """The offers of `count` machines of a type, the safe ones first."""
        if self.safe is None:
            return [self.sold[name]] * count
        anchors = int(self._anchors(np.array([count]))[0])
        return [self.safe[name]] * anchors + [self.sold[name]] * (count - anchors)

    def bought(self, names: Sequence[str], counts: Wholes) -> tuple[list[Pool], Wholes, FloatArray]:
        """The pools that clusters of `counts` (clusters, names) machines buy from, how many of each, and their prices.

        A type that is not sold here is in none of the clusters; prices are dollars an hour of a machine's whole bill,
        NaN where unknown.
        """
        here = [at for at, name in enumerate(names) if name in self.sold]
        wanted = counts[:, here]
        offers = [self.sold[names[at]] for at in here]
        if self.safe is not None:
            anchors = np.where(wanted > 0, self._anchors(wanted), 0)
            wanted = np.concatenate([anchors, wanted - anchors], axis=1)
            offers = [self.safe[names[at]] for at in here] + offers
        usd = np.array([one.total_usd_per_hour for one in offers], dtype=float)  # None becomes NaN
        return [Pool.of(one) for one in offers], wanted, usd

    def _anchors(self, counts: Wholes) -> Wholes:
        return counts // 2 if self.half else np.ones_like(counts)


def _by_name(offers: Iterable[Offer]) -> dict[str, Offer]:
    return {one.instance_type.name: one for one in offers}


def mixed_options(groups: Sequence[Sequence[Offer]]) -> Iterator[PurchaseOption]:
    """Both mixtures of every two markets that sell the same types in one zone; `groups` are offers by market and zone.

    A price on demand that holds in any zone of its region holds beside each of them.
    """
    for safe in groups:
        for cheap in groups:
            one, other = safe[0], cheap[0]
            together = one.region == other.region and one.zone in (other.zone, ANY_ZONE)
            if not together or (one.market, other.market) != ("on-demand", "spot"):
                continue
            anchors = _by_name(safe)
            sold = {name: offer for name, offer in _by_name(cheap).items() if name in anchors}
            for half in (False, True) if sold else ():
                yield PurchaseOption(
                    sold=sold, safe={name: anchors[name] for name in sold}, half=half
                )


Zone = tuple[str, str, str]  # market, region, zone
Terms = Mapping[
    str, tuple[float, float]
]  # instance type -> dollars an hour (inf: unknown), interruptions an hour

# Zones of one market that are compared whole, beaten ones aside: each costs as much again as the first.
MOST_ZONES = 4


def without_beaten_zones(offers: Sequence[Offer], *, most: int = MOST_ZONES) -> list[Offer]:
    """`offers` without those of beaten zones, in the same order; of equal zones the first by name stays.

    Where more than `most` of a market are left, those stay that are the cheapest for most types, and of the others only
    the types that are nowhere cheaper: a cluster of one type is still found where it costs least, one of several types
    might have cost less elsewhere.
    """
    sold: dict[Zone, dict[str, tuple[float, float]]] = {}
    for offer in offers:
        terms, name = sold.setdefault(_zone(offer), {}), offer.instance_type.name
        terms[name] = min(
            (price_or_inf(offer), offer.interruptions_per_hour),
            terms.get(name, (math.inf, math.inf)),
        )
    whole: set[Zone] = set()
    cheapest: set[tuple[Zone, str]] = set()
    for market in {zone[0] for zone in sold}:
        mine = _unbeaten({zone: terms for zone, terms in sorted(sold.items()) if zone[0] == market})
        names = {name for terms in mine.values() for name in terms}
        least = {
            name: min((terms[name][0], zone) for zone, terms in mine.items() if name in terms)[1]
            for name in names
        }
        cheapest |= {(zone, name) for name, zone in least.items()}
        wins = Counter(least.values())
        whole |= set(sorted(mine, key=lambda zone: (-wins[zone], zone))[:most])
    return [
        one
        for one in offers
        if _zone(one) in whole or (_zone(one), one.instance_type.name) in cheapest
    ]


def _zone(offer: Offer) -> Zone:
    return offer.market, offer.region, offer.zone


def _unbeaten(zones: Mapping[Zone, Terms]) -> dict[Zone, Terms]:
    """Those that no other beats; of two that beat each other the one that sorts first."""
    return {
        zone: terms
        for zone, terms in zones.items()
        if not any(
            other != zone and _beats(others, terms) and (other < zone or not _beats(terms, others))
            for other, others in zones.items()
        )
    }


def _beats(ours: Terms, theirs: Terms) -> bool:
    """Has `ours` every type of `theirs`, none dearer and none riskier?"""
    return all(
        name in ours and ours[name][0] <= usd and ours[name][1] <= hazard
        for name, (usd, hazard) in theirs.items()
    )
