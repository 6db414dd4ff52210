"""Plan the launches of a campaign: which clusters to buy next, and which runs to measure on them.

A campaign is all launches of one run of `srift refresh`. It has caps on dollars and seconds. A
launch acquires a cluster and measures several runs on it. Training runs are added to a launch until
the next run would lower the average value per second. `run_value.py` defines the value of a run.

The next launch is the launch with the highest ratio of value to cost. The value is the sum of the
values of the launch's runs. The cost is the larger share of what remains under the two caps:

    cost = max(dollars / remaining dollars, billed seconds / remaining seconds)

Profiles have a high value, so the first launches profile every workload on every instance type.
Planning stops when no training run or profile with a value above 0 fits the caps.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, product
from typing import Any

from ..domain.cluster import Cluster, Offer
from ..domain.numeric import ROUNDING
from ..domain.setup_table import machines_of, mode_of, types_of
from ..domain.workload import Mode, Workload
from ..job.restarts import PRIOR_S
from ..planner.enumeration import Refusal, clusters_of
from ..step_time.machine_specs import computes
from .candidates import (
    MESSAGE_BYTES,
    Costs,
    Model,
    PlannedRun,
    Schedule,
    learning_runs,
    profile_of,
    sub_clusters,
    training_runs,
)
from .run_value import Knowledge, Past
from .value_of_information import LEAST_CHANCE, LEAST_REGRET

# If more clusters are possible in a zone, some are skipped (see planner/enumeration.py).
MOST_CLUSTERS = 600
_ELASTIC_WORK_S = 30.0  # approximate seconds of training in an elastic run, without the lost time
_ROUNDS = 2.0**33 + 1  # rounds a float to 53 - 33 bits [Dekker 1971]
_LEARNING_SHARE = 2 / 3  # maximum share of the caps for runs that check convergence
# A training run whose four features are new has the value 4. A probe (a sweep of all-reduces) helps
# every workload on the cluster. A profile has the highest value: without a profile, no run of its
# workload on its instance type can be predicted.
_VALUES = {"probe": 1.5, "profile": 20.0}
STOPS = (
    "the campaign stops: no launch within the caps can improve a recommendation enough (at least a"
    f" {LEAST_CHANCE:.0%} chance to change it, and an expected saving of {LEAST_REGRET:.1%})"
)


@dataclass(frozen=True, kw_only=True)
class CampaignLimits:
    """The limits of a campaign: its caps, and the clusters that it may launch.

    - `max_usd`, `max_seconds`: the caps on the dollars and seconds of all launches together
    - `max_hosts`: the maximum number of machines of a cluster
    - `fits(cluster)`: returns "" if the cluster can be launched, or else the reason why it cannot
    - `market`: "spot" or "on-demand"; all machines come from this market
    - `costs`: the assumed seconds that launches and runs take
    """

    max_usd: float
    max_seconds: float
    max_hosts: int
    fits: Refusal
    market: str = "spot"
    costs: Costs = field(default_factory=Costs)

    def after(self, *launches: PlannedLaunch) -> CampaignLimits:
        """Return the limits with the dollars and seconds that remain after `launches`.

        If the launches exceed a cap, the remaining amount is negative.
        """
        return replace(
            self,
            max_seconds=self.max_seconds - sum(launch.est_s for launch in launches),
            max_usd=self.max_usd - sum(launch.est_usd for launch in launches),
        )

    @property
    def are_kept(self) -> bool:
        """True if no cap is exceeded: the remaining dollars and seconds are not negative."""
        return self.max_seconds >= 0 and self.max_usd >= 0

    def priced(self, offers: Iterable[Offer]) -> list[Offer]:
        """Return the offers that have a known price and belong to the campaign's market."""
        return [
            offer
            for offer in offers
            if offer.market == self.market and offer.usd_per_hour is not None
        ]


@dataclass(frozen=True, kw_only=True)
class PlannedLaunch:
    """A cluster to acquire, and the runs (`items`) to measure on it, in this order.

    `est_s` is the estimated duration in seconds, including the start of the machines. `est_usd` is
    the estimated cost in dollars.
    """

    cluster: Cluster
    items: tuple[PlannedRun, ...]
    est_s: float
    est_usd: float
    reason: str


def launch_of(cluster: Cluster, runs: Sequence[PlannedRun], costs: Costs) -> PlannedLaunch:
    """Return a launch of `cluster` that measures `runs`.

    Runs on a single machine come first, in parallel on different machines of the cluster.
    """
    schedule = Schedule(cluster)
    ordered = sorted(runs, key=lambda run: len(run.members) > 1)
    items = tuple(replace(run, nodes=schedule.add(run)) for run in ordered)
    kinds = Counter(run.kind for run in runs)
    return PlannedLaunch(
        cluster=cluster,
        items=items,
        est_s=costs.launch_s + schedule.seconds,
        est_usd=costs.billed_s(schedule.seconds) * _usd_per_second(cluster),
        reason=", ".join(f"{count} {kind}" for kind, count in kinds.items()),
    )


def _usd_per_second(cluster: Cluster) -> float:
    return max(cluster.total_usd_per_hour or 0.0, 1e-12) / 3600


def shopping_list(
    limits: CampaignLimits,
    workloads: Sequence[Workload],
    offers: Sequence[Offer],
    past: Past,
    *,
    model: Model | None = None,
) -> Iterator[PlannedLaunch]:
    """Yield the launches to buy within the caps, in the order in which to buy them.

    A measured setup is measured again in two cases: its measurement is too old, or its instance
    type drifts. A type drifts if too many of its new runs lie outside their predicted intervals. A
    run that the model can predict is bought only if its result may change a choice.

    Args:
        limits: the caps and the market. Only offers of this market with a known price are bought.
        workloads: the workloads to measure, in each of their modes.
        offers: the newest offers.
        past: the measurements so far.
        model: the model in use; None if there is no model.
    """
    priced = limits.priced(offers)
    clusters = list(
        clusters_of(priced, max_hosts=limits.max_hosts, fits=limits.fits, most=MOST_CLUSTERS)
    )
    runs = training_runs(workloads, clusters, past.profiles, model=model, costs=limits.costs)
    devices = {offer.instance_type.name: offer.instance_type.devices for offer in priced}
    known = Knowledge.of(past, devices)
    left = dict.fromkeys(filter(known.needs, runs))
    if model is not None:
        known.learn(model, left)
    profiles = _profiles(workloads, priced, limits.costs)
    while limits.max_usd > 0 and limits.max_seconds > 0:
        found = _next_launch(limits, clusters, left, profiles, known)
        if found is None:
            break
        cluster, picked = found
        explained = [replace(run, reason=known.reason(run)) for run in picked]
        launch = launch_of(cluster, explained, limits.costs)
        yield launch
        limits = limits.after(launch)
        for run in picked:
            known.add(run)
            left.pop(run, None)
        known.revalue(run.workload for run in picked)


def _profiles(
    workloads: Sequence[Workload], offers: Sequence[Offer], costs: Costs
) -> list[PlannedRun]:
    """Return a profile run for each workload, each mode and each type that supports the mode.

    A profile run times several batch sizes on one device. A mode that needs several devices is
    profiled in the corresponding mode for one device (`Mode.alone`).
    """
    kinds = {offer.instance_type.name: offer.instance_type for offer in offers}
    runs = [
        profile_of(workload, mode, kinds[name], costs)
        for workload in workloads
        for mode, name in product(workload.modes, sorted(kinds))
        if computes(kinds[name].device, mode)
    ]
    return list(dict.fromkeys(runs))


def learning_launches(
    limits: CampaignLimits, wanted: Sequence[tuple[Workload, Mode, range]], offers: Sequence[Offer]
) -> list[PlannedLaunch]:
    """Return launches that check if modes converge like DDP, at most one launch per workload.

    Each launch has two equal machines, of the cheapest type that stays within the caps and can
    train in at least one of the modes. All launches together use at most two thirds of the caps.

    `wanted` has a (workload, mode, random seeds) triple for each check, sorted by workload. If the
    caps are too low for all checks of a workload, its last triples are left out.
    """
    if limits.max_hosts < 2:
        return []
    pairs = [Cluster(members=(offer, offer)) for offer in limits.priced(offers)]
    pairs = [pair for pair in sorted(pairs, key=_usd_per_second) if not limits.fits(pair)]
    left = replace(
        limits,
        max_seconds=limits.max_seconds * _LEARNING_SHARE,
        max_usd=limits.max_usd * _LEARNING_SHARE,
    )
    found: list[PlannedLaunch] = []
    for _, checks in groupby(wanted, key=lambda check: check[0].name):
        modes = list(checks)
        for count, pair in product(range(len(modes), 0, -1), pairs):
            found_runs = (learning_runs(*each, pair, limits.costs) for each in modes[:count])
            runs = list(dict.fromkeys(chain(*found_runs)))  # several modes share a dense mode
            launch = launch_of(pair, runs, limits.costs)
            rest = left.after(launch)
            if runs and rest.are_kept:
                found.append(launch)
                left = rest
                break
    return found


def elastic_launch(
    limits: CampaignLimits, recommended: Mapping[str, Any], offers: Sequence[Offer]
) -> PlannedLaunch | None:
    """Return a launch that measures the cost of losing a machine during training.

    The launch trains with the setup of `recommended`, a row of the published table. It stops the
    last machine on purpose. The first machine is on-demand, and all other machines are spot.
    Returns None in these cases:

    - The setup has a single machine.
    - The strategy is not DDP, or a switch such as torch.compile or offload is on.
    - An instance type is not on offer in the required market.
    - The cluster cannot be launched, or the launch would exceed the caps.
    """
    name, mode = recommended["cluster"], mode_of(recommended)
    types = types_of(name) if isinstance(name, str) else ()
    by_market = {(offer.instance_type.name, offer.market): offer for offer in reversed(offers)}
    wanted = [(kind, "spot" if at else "on-demand") for at, kind in enumerate(types)]
    if len(types) < 2 or mode != Mode(mode.precision) or not by_market.keys() >= set(wanted):
        return None
    cluster = Cluster(members=tuple(by_market[name] for name in wanted))
    if limits.fits(cluster):
        return None
    devices, batches = machines_of(name, recommended["layout"], recommended["batch_per_device"], {})
    step_s = recommended["step_s"]
    every = max(1, round(_ELASTIC_WORK_S / step_s / 10))
    run = PlannedRun(
        kind="elastic",
        workload=recommended["workload"],
        mode=mode,
        members=types,
        devices=devices,
        batches=batches,
        accumulation_steps=int(recommended["accumulation_steps"]),
        steps=10 * every,
        checkpoint_every=every,
        lose_after_s=4 * every * step_s,  # after the third checkpoint
        # After the loss, n - 1 machines do the work of n: a step takes n / (n - 1) times as long.
        est_s=10 * every * step_s * len(types) / (len(types) - 1) + max(PRIOR_S.values()),
        reason="the cost of losing a machine",
    )
    launch = launch_of(cluster, [run], limits.costs)
    return launch if limits.after(launch).are_kept else None


def _next_launch(
    limits: CampaignLimits,
    clusters: Sequence[Cluster],
    runs: Iterable[PlannedRun],
    profiles: Sequence[PlannedRun],
    known: Knowledge,
) -> tuple[Cluster, list[PlannedRun]] | None:
    """Return the best next launch: the cluster to acquire, and the runs to measure on it.

    The best launch has the highest ratio of value to cost. The docstring of the module defines
    value and cost. Returns None if no run that fits the caps has a value above 0.

    clusters: the clusters to choose from.
    runs, profiles: the training runs and the profile runs to choose from.
    known: the information from measured and planned runs, which determines values.
    """
    costs = limits.costs
    valued: dict[tuple[str, ...], list[tuple[float, PlannedRun]]] = defaultdict(list)
    for run in runs:
        valued[run.members].append((known.value(run), run))
    wanted = [run for run in profiles if known.needs(run)]
    best: tuple[Cluster, list[PlannedRun]] | None = None
    most = 0.0
    for cluster in clusters:
        names, price = cluster.type_names, _usd_per_second(cluster)
        affordable_s = min(limits.max_seconds, limits.max_usd / price)
        if costs.minimum_s > affordable_s:
            continue
        first = [run for run in wanted if run.members[0] in names]
        probes = [
            PlannedRun(
                kind="probe", members=members, message_bytes=MESSAGE_BYTES, est_s=costs.probe_s
            )
            for members in dict.fromkeys([names[:2], names])
            if len(members) > 1
        ]
        first += filter(known.needs, probes)
        most_s = affordable_s - costs.launch_s
        picked, per_s = _fill(cluster, first, valued, known, costs, most_s)
        value = per_s * affordable_s
        if picked and (best is None or value > most * (1 + ROUNDING)):
            best, most = (cluster, picked), value
    return best


def _fill(
    cluster: Cluster,
    first: Sequence[PlannedRun],
    valued: Mapping[tuple[str, ...], Sequence[tuple[float, PlannedRun]]],
    known: Knowledge,
    costs: Costs,
    most_s: float,
) -> tuple[list[PlannedRun], float]:
    """Return the best runs for a launch of `cluster`, and their value per billed second.

    1. The profiles and probes in `first` are added if they fit into `most_s` seconds.
    2. Training runs that fit are added, in descending order of value per second. Adding stops
       before the training runs' average value per billed second would fall.

    Returns ([], 0.0) if the launch would have neither a training run nor a profile.

    valued: {instance types of a run's machines: (value, training run) pairs}. A run that uses only
        a part of the cluster is considered, too.
    most_s: the maximum total duration of the runs in seconds.
    """
    schedule, trial = Schedule(cluster), known.copy()
    chosen: list[PlannedRun] = []
    for run in first:
        if schedule.seconds_with(run) <= most_s:
            chosen.append(run)
            schedule.add(run)
            trial.add(run)
    first_value = sum(_VALUES[run.kind] for run in chosen)
    first_s = schedule.seconds
    parts = sub_clusters(cluster.type_names)
    runs = [pair for members in parts for pair in valued.get(members, ()) if pair[0] > 0]
    # Adding a run only lowers the values of other runs. A value in the heap is therefore an upper
    # bound, and is computed again when it comes to the top.
    heap = [(-_per_second(value, run), at) for at, (value, run) in enumerate(runs)]
    heapq.heapify(heap)
    total = 0.0
    while heap:
        _, at = heapq.heappop(heap)
        run = runs[at][1]
        if schedule.seconds_with(run) > most_s:
            continue
        value = trial.value(run)
        order = -_per_second(value, run)
        if heap and order > heap[0][0]:
            heapq.heappush(heap, (order, at))
            continue
        before_s = costs.billed_s(schedule.seconds - first_s)
        after_s = costs.billed_s(schedule.seconds - first_s + run.est_s)
        if value <= 0 or (after_s > before_s and value / run.est_s < total / before_s):
            break
        chosen.append(run)
        schedule.add(run)
        trial.add(run)
        total += value
    if all(run.kind == "probe" for run in chosen):
        return [], 0.0
    return chosen, (first_value + total) / costs.billed_s(schedule.seconds)


def _per_second(value: float, run: PlannedRun) -> float:
    """Return the value per second of `run`, rounded to 20 bits.

    Without rounding, floating-point errors would decide the order of runs with equal values.
    """
    exact = value / run.est_s
    shifted = exact * _ROUNDS
    return shifted - (shifted - exact)
