"""Launches to buy next under caps of dollars and seconds, each of which serves many runs.

First every workload is profiled on every instance type, by few launches that hold all types. Then
the launch follows with the best value (`run_value.py`) per share of the caps, and so on. A launch
ends where one more run would lower its value per second; the list ends where no run has any value.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from ..domain.cluster import Cluster, Offer, parse_cluster, parse_numbers
from ..domain.numeric import ROUNDING
from ..domain.setup_table import Key, mode_of
from ..domain.workload import Mode, Workload
from ..job.restarts import PRIOR_S
from ..planner.enumeration import Refusal, clusters_of
from ..step_time.machine_specs import computes
from .candidates import (
    Costs,
    Model,
    PlannedRun,
    Schedule,
    in_order,
    learning_runs,
    probe_of,
    profile_of,
    sub_clusters,
    training_runs,
    type_names,
)
from .run_value import Knowledge, Past, Profile
from .value_of_information import LEAST_CHANCE, LEAST_REGRET

MOST_CLUSTERS = 600  # that one campaign compares
_ELASTIC_WORK_S = 30.0
_LEARNING_SHARE = 2 / 3  # of the caps, at most, for learning runs
_PROBE_VALUE = 1.5  # a sweep serves every workload on its cluster
STOPS = (
    "the campaign stops: no launch within the caps is expected to change a choice of the table"
    f" (in {LEAST_CHANCE:.0%} of outcomes, saving {LEAST_REGRET:.1%})"
)
Valued = Mapping[tuple[str, ...], Sequence[tuple[float, PlannedRun]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignLimits:
    """Caps of all launches together, their market, and the clusters that `fits` allows."""

    max_usd: float
    max_seconds: float
    max_hosts: int
    fits: Refusal
    seed: int
    market: str = "spot"
    costs: Costs = field(default_factory=Costs)
    most_launches: int | None = None

    def after(self, launches: Sequence[PlannedLaunch]) -> CampaignLimits:
        """Return the limits that `launches` leave."""
        return replace(
            self,
            max_seconds=self.max_seconds - sum(launch.est_s for launch in launches),
            max_usd=self.max_usd - sum(launch.est_usd for launch in launches),
        )

    def priced(self, offers: Iterable[Offer]) -> list[Offer]:
        """Return the offers of the market with a known price."""
        return [one for one in offers if one.market == self.market and one.usd_per_hour is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLaunch:
    """One cluster and its runs, in order; `est_s` includes its start."""

    cluster: Cluster
    items: tuple[PlannedRun, ...]
    est_s: float
    est_usd: float
    reason: str


def launch_of(cluster: Cluster, runs: Sequence[PlannedRun], costs: Costs) -> PlannedLaunch:
    """Return one launch for `runs`, those of one machine first, side by side."""
    ordered, run_s = in_order(cluster, runs)
    kinds = Counter(run.kind for run in runs)
    return PlannedLaunch(
        cluster=cluster,
        items=tuple(replace(run, nodes=nodes) for run, nodes in ordered),
        est_s=costs.launch_s + run_s,
        est_usd=costs.billed_s(run_s) * _usd_per_second(cluster),
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
    buyable: Mapping[Key, PlannedRun] | None = None,
) -> list[PlannedLaunch]:
    """Return launches in order, whose estimates add up to at most the caps; the same for the same
    arguments.

    Only priced offers of the limits' market are bought. Settled setups are not repeated. With a
    model, runs that it knows are bought only where they may change a choice. `buyable` replaces
    `training_runs`.
    """
    priced = limits.priced(offers)
    if limits.max_usd <= 0 or limits.max_seconds <= 0 or not priced or not workloads:
        return []
    jobs = in_each_mode(workloads)
    clusters = list(
        clusters_of(priced, max_hosts=limits.max_hosts, fits=limits.fits, most=MOST_CLUSTERS)
    )
    runs = buyable
    if runs is None:
        runs = training_runs(jobs, clusters, past.profiles, model=model, costs=limits.costs)
    devices = {offer.instance_type.name: offer.instance_type.devices for offer in priced}
    known = Knowledge.of(past, _profiles_of(jobs, priced), devices)
    left = [run for key, run in runs.items() if ("train", key) not in known.done]
    ties = np.random.default_rng(limits.seed).random(len(left))
    known.ties = dict(zip(left, ties.tolist(), strict=True))
    if model is not None:
        known.learn(model, left, past, devices)
    return _buy(limits, clusters, left, known, {job.name: job for job in workloads})


def in_each_mode(workloads: Iterable[Workload]) -> list[Workload]:
    """Return each workload once for each of its modes, in that mode alone."""
    return [replace(job, modes=(mode,)) for job in workloads for mode in job.modes]


def _profiles_of(jobs: Sequence[Workload], offers: Sequence[Offer]) -> list[Profile]:
    """Return what to profile, ordered so that each step brings another workload and another type.

    Modes of several devices are profiled as they run on one.
    """
    kinds = {offer.instance_type.name: offer.instance_type for offer in offers}
    rows = list(dict.fromkeys((job.name, job.modes[0].alone) for job in jobs))
    grid: dict[Profile, tuple[int, int]] = {}
    for job, (at, name) in product(jobs, enumerate(sorted(kinds))):
        trained = job.name, job.modes[0].alone
        if computes(kinds[name].device, job.modes[0]):
            grid[trained, name] = (rows.index(trained) - at) % len(rows), at
    return sorted(grid, key=grid.__getitem__)


def learning_launches(
    limits: CampaignLimits, wanted: Sequence[tuple[Workload, Mode]], offers: Sequence[Offer]
) -> list[PlannedLaunch]:
    """Return a launch a workload with the learning runs of its `wanted` modes.

    On the two machines of one type that cost least, with as many modes as two thirds of the caps
    pay for.
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
    for name in dict.fromkeys(workload.name for workload, _ in wanted):
        modes = [pair for pair in wanted if pair[0].name == name]
        for count, pair in product(range(len(modes), 0, -1), pairs):
            runs: dict[tuple[Mode, int], PlannedRun] = {}  # several modes share the dense one
            for job, mode in modes[:count]:
                for run in learning_runs(job, mode, pair, limits.costs):
                    runs.setdefault((run.mode, run.seed), run)
            launch = launch_of(pair, list(runs.values()), limits.costs)
            rest = left.after([launch])
            if runs and min(rest.max_seconds, rest.max_usd) >= 0:
                found.append(launch)
                left = rest
                break
    return found


def elastic_launch(
    limits: CampaignLimits, recommended: Mapping[str, Any], offers: Sequence[Offer]
) -> PlannedLaunch | None:
    """Return a launch of a recommended row that loses its last machine, to learn what a loss costs.

    About 30 s of steps with ten checkpoints; the first machine is on demand. None for one machine,
    for a mode whose state is not whole on each device, beyond the caps, and for machines that are
    not on offer.
    """
    types = parse_cluster(recommended["cluster"]) if isinstance(recommended["cluster"], str) else ()
    mode = mode_of(recommended)
    by_market = {(offer.instance_type.name, offer.market): offer for offer in reversed(offers)}
    wanted = [(name, "spot" if at else "on-demand") for at, name in enumerate(types)]
    whole = mode == Mode(precision=mode.precision)
    if len(types) < 2 or not whole or not by_market.keys() >= set(wanted):
        return None
    cluster = Cluster(members=tuple(by_market[one] for one in wanted))
    if limits.fits(cluster):
        return None
    step_s = float(recommended["step_s"])
    every = max(1, round(_ELASTIC_WORK_S / step_s / 10))
    run = PlannedRun(
        kind="elastic",
        workload=str(recommended["workload"]),
        mode=mode,
        members=types,
        devices=parse_numbers(str(recommended["layout"]), len(types), "layout"),
        batches=parse_numbers(str(recommended["batch_per_device"]), len(types), "batch_per_device"),
        accumulation_steps=int(recommended["accumulation_steps"]),
        steps=10 * every,
        checkpoint_every=every,
        lose_after_s=4 * every * step_s,  # after the third checkpoint
        # with a machine less a step takes longer, at most by two machines' share
        est_s=10 * every * step_s * len(types) / (len(types) - 1) + max(PRIOR_S.values()),
        reason="the cost of losing a machine",
    )
    launch = launch_of(cluster, [run], limits.costs)
    rest = limits.after([launch])
    return launch if min(rest.max_seconds, rest.max_usd) >= 0 else None


def _buy(
    limits: CampaignLimits,
    clusters: Sequence[Cluster],
    runs: Sequence[PlannedRun],
    known: Knowledge,
    workloads: Mapping[str, Workload],
) -> list[PlannedLaunch]:
    """Buy launch after launch, the best value per share of the caps first."""
    costs = limits.costs
    left = dict.fromkeys(runs)
    covering = _covering(clusters, known)
    launches: list[PlannedLaunch] = []
    seconds, usd = limits.max_seconds, limits.max_usd
    while seconds > 0 and usd > 0 and len(launches) != limits.most_launches:
        valued: dict[tuple[str, ...], list[tuple[float, PlannedRun]]] = defaultdict(list)
        for run in left:
            valued[run.members].append((known.value(run), run))
        share = seconds / max(len(covering), 1)
        best: tuple[Cluster, list[PlannedRun]] | None = None
        most = 0.0
        for cluster in covering[:1] or clusters:
            price = _usd_per_second(cluster)
            if costs.minimum_s * price > usd:
                continue
            first = _before_training(cluster, known, workloads, costs)
            most_s = min(share, usd / price) - costs.launch_s
            picked, per_s = _fill(cluster, first, valued, known, costs, most_s)
            value = per_s / max(1 / seconds, price / usd)
            if picked and (best is None or value > most * (1 + ROUNDING)):
                best, most = (cluster, picked), value
        if best is None and not covering:
            break
        covering = covering[1:]
        if best is None:
            continue
        cluster, picked = best
        explained = [replace(run, reason=known.reason(run)) for run in picked]
        launch = launch_of(cluster, explained, costs)
        for run in picked:
            known.add(run)
            left.pop(run, None)
        launches.append(launch)
        known.revalue()
        seconds -= launch.est_s
        usd -= launch.est_usd
    return launches


def _covering(clusters: Sequence[Cluster], known: Knowledge) -> list[Cluster]:
    """Return few clusters that hold every instance type with a profile to buy (greedy cover)."""
    types = {cluster: set(type_names(cluster)) for cluster in clusters}
    missing = {name for _, name in known.unprofiled(set().union(*types.values()))}

    def gain(cluster: Cluster) -> tuple[int, int, int]:
        names = types[cluster]
        return len(missing & names), len(names), len(cluster.members)

    cover: list[Cluster] = []
    while missing:
        cover.append(max(clusters, key=gain))
        missing -= types[cover[-1]]
    return cover


def _before_training(
    cluster: Cluster, known: Knowledge, workloads: Mapping[str, Workload], costs: Costs
) -> list[PlannedRun]:
    """Return missing profiles, and sweeps over two machines and over all."""
    kinds = {offer.instance_type.name: offer.instance_type for offer in cluster.members}
    profiles = [
        profile_of(replace(workloads[workload], modes=(mode,)), kinds[name], costs)
        for (workload, mode), name in known.unprofiled(kinds)
    ]
    names = type_names(cluster)
    sweeps = [
        probe_of(members, costs)
        for members in dict.fromkeys([names[:2], names])
        if len(members) > 1 and known.explores(members)
    ]
    return [*profiles, *sweeps]


def _fill(
    cluster: Cluster,
    first: Sequence[PlannedRun],
    valued: Valued,
    known: Knowledge,
    costs: Costs,
    most_s: float,
) -> tuple[list[PlannedRun], float]:
    """Return the best runs within `most_s` for one launch, and their value a billed second.

    Training runs follow the `first` by value per second (lazily re-valued: values only fall) until
    one more has less than the launch so far. Seconds within the minimum bill cost nothing.
    """
    schedule, trial = Schedule(cluster), known.copy()
    chosen: list[PlannedRun] = []
    for run in first:
        if schedule.seconds + schedule.extra_s(run) <= most_s:
            chosen.append(run)
            schedule.add(run)
            trial.add(run)
    total = _PROBE_VALUE * sum(run.kind == "probe" for run in chosen)
    free_s = max(schedule.alone_s)  # profiles are bought anyway: no run is weighed by them
    parts = sub_clusters(type_names(cluster))
    runs = [pair for members in parts for pair in valued.get(members, ()) if pair[0] > 0]
    heap = [(-_per_second(value, run), at) for at, (value, run) in enumerate(runs)]
    heapq.heapify(heap)
    trains: list[PlannedRun] = []
    while heap:
        _, at = heapq.heappop(heap)
        run = runs[at][1]
        if schedule.seconds + schedule.extra_s(run) > most_s:
            continue
        value = trial.value(run)
        if heap and -_per_second(value, run) > heap[0][0]:
            heapq.heappush(heap, (-_per_second(value, run), at))
            continue
        before_s = costs.billed_s(schedule.seconds - free_s)
        after_s = costs.billed_s(schedule.seconds - free_s + run.est_s)
        if value <= 0 or (after_s > before_s and value / run.est_s < total / before_s):
            break
        trains.append(run)
        schedule.add(run)
        trial.add(run)
        total += value
    if not trains and not any(run.kind == "profile" for run in chosen):
        return [], 0.0
    return [*chosen, *trains], total / costs.billed_s(schedule.seconds - free_s)


def _per_second(value: float, run: PlannedRun) -> float:
    """Return value per second to six digits, so that rounding orders nothing."""
    return float(f"{value / run.est_s:.6g}")
