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
    PlannedRun,
    Schedule,
    Trained,
    in_order,
    learning_runs,
    probe_of,
    profile_of,
    sub_clusters,
    training_runs,
)
from .run_value import Knowledge, Model, Past, Profile
from .value_of_information import LEAST_CHANCE, LEAST_REGRET

MOST_CLUSTERS = 600  # that one campaign compares
_ELASTIC_WORK_S = 30.0
_LEARNING_SHARE = 2 / 3  # of the caps, at most, for learning runs
_PROBE_VALUE = 1.5  # a sweep serves every workload on its cluster
STOPS = (
    "the campaign stops: no launch within the caps is expected to change a choice of the table"
    f" (in {LEAST_CHANCE:.0%} of outcomes, saving {LEAST_REGRET:.1%})"
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLaunch:
    """One cluster and its runs, in order; `est_s` includes its start."""

    cluster: Cluster
    items: tuple[PlannedRun, ...]
    est_s: float
    est_usd: float
    reason: str


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
    priced = [
        offer
        for offer in offers
        if offer.market == limits.market and offer.usd_per_hour is not None
    ]
    if limits.max_usd <= 0 or limits.max_seconds <= 0 or not priced or not workloads:
        return []
    jobs = in_each_mode(workloads)
    clusters = list(
        clusters_of(priced, max_hosts=limits.max_hosts, fits=limits.fits, most=MOST_CLUSTERS)
    )
    runs = buyable
    if runs is None:
        runs = training_runs(
            jobs,
            _parts(clusters),
            past.profiles,
            expected_step=None if model is None else model.expected_step,
            costs=limits.costs,
        )
    devices = {offer.instance_type.name: offer.instance_type.devices for offer in priced}
    known = Knowledge.of(past, _profiles_of(jobs, priced), devices)
    left = [run for key, run in runs.items() if key not in known.settled]
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
    modes = [job.modes[0] for job in jobs]
    trained = [
        (job.name, m.alone if m.of_several else m) for job, m in zip(jobs, modes, strict=True)
    ]
    by_name = {offer.instance_type.name: offer.instance_type for offer in offers}
    rows = dict.fromkeys(trained)
    wanted = {
        (row, name)
        for (row, mode), name in product(zip(trained, modes, strict=True), by_name)
        if computes(by_name[name].device, mode)
    }
    grid = [
        ((w - t) % len(rows), t, (row, name))
        for w, row in enumerate(rows)
        for t, name in enumerate(sorted(by_name))
        if (row, name) in wanted
    ]
    return [profile for *_, profile in sorted(grid, key=lambda place: place[:2])]


def learning_launches(
    limits: CampaignLimits, wanted: Sequence[tuple[Workload, Mode]], offers: Sequence[Offer]
) -> list[PlannedLaunch]:
    """Return a launch a workload with the learning runs of its `wanted` modes.

    On the two machines of one type that cost least, with as many modes as two thirds of the caps
    pay for.
    """
    priced = [
        offer
        for offer in offers
        if offer.market == limits.market and offer.total_usd_per_hour is not None
    ]
    pairs = [Cluster(members=(offer, offer)) for offer in priced] if limits.max_hosts > 1 else []
    pairs = [pair for pair in sorted(pairs, key=_usd_per_second) if not limits.fits(pair)]
    left = replace(
        limits,
        max_seconds=limits.max_seconds * _LEARNING_SHARE,
        max_usd=limits.max_usd * _LEARNING_SHARE,
    )
    found = []
    for name in dict.fromkeys(workload.name for workload, _ in wanted):
        modes = [pair for pair in wanted if pair[0].name == name]
        launches = (
            _launch_for(pair, _learning_of(modes[:count], pair, limits.costs), limits.costs)
            for count, pair in product(range(len(modes), 0, -1), pairs)
        )
        for launch in launches:
            rest = left.after([launch])
            if launch.items and rest.max_seconds >= 0 and rest.max_usd >= 0:
                found.append(launch)
                left = rest
                break
    return found


def _learning_of(
    wanted: Sequence[tuple[Workload, Mode]], pair: Cluster, costs: Costs
) -> list[PlannedRun]:
    """Return the runs of all modes; those of the dense mode, which several share, once."""
    runs = [run for job, mode in wanted for run in learning_runs(job, mode, pair, costs)]
    return list({(run.trained, run.seed): run for run in reversed(runs)}.values())[::-1]


def elastic_launch(
    limits: CampaignLimits, recommended: Mapping[str, Any], offers: Sequence[Offer]
) -> PlannedLaunch | None:
    """Return a launch of a recommended row that loses its last machine, to learn what a loss costs.

    About 30 s of steps with ten checkpoints; the first machine is on demand. None for one machine,
    for a mode whose state is not whole on each device, and for machines that are not on offer.
    """
    types = parse_cluster(recommended["cluster"]) if isinstance(recommended["cluster"], str) else ()
    mode = mode_of(recommended)
    by_market = {(offer.instance_type.name, offer.market): offer for offer in reversed(offers)}
    wanted = [(name, "spot" if at else "on-demand") for at, name in enumerate(types)]
    if len(types) < 2 or mode != Mode(precision=mode.precision):
        return None
    if not by_market.keys() >= set(wanted):
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
        nodes=tuple(range(len(types))),
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
    return _launch_for(cluster, [run], limits.costs)


def _launch_for(cluster: Cluster, runs: Sequence[PlannedRun], costs: Costs) -> PlannedLaunch:
    """Return a launch of `runs` one after the other on all of `cluster`."""
    est_s = costs.billed_s(sum(run.est_s for run in runs))
    return PlannedLaunch(
        cluster=cluster,
        items=tuple(runs),
        est_s=est_s,
        est_usd=est_s * _usd_per_second(cluster),
        reason=_reason(runs),
    )


def launch_of(cluster: Cluster, runs: Sequence[PlannedRun], costs: Costs) -> PlannedLaunch:
    """Return one launch for `runs`, those of one machine first, side by side."""
    ordered, run_s = in_order(cluster, runs)
    return PlannedLaunch(
        cluster=cluster,
        items=tuple(replace(run, nodes=nodes) for run, nodes in ordered),
        est_s=costs.launch_s + run_s,
        est_usd=costs.billed_s(run_s) * _usd_per_second(cluster),
        reason=_reason(runs),
    )


def _reason(runs: Sequence[PlannedRun]) -> str:
    kinds = Counter(run.kind for run in runs)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _parts(clusters: Sequence[Cluster]) -> list[Cluster]:
    """Return every distinct sub-cluster of the clusters."""
    parts: dict[tuple[str, ...], Cluster] = {}
    for cluster in clusters:
        for members, nodes in sub_clusters(_names(cluster)).items():
            if members not in parts:
                parts[members] = Cluster(members=tuple(cluster.members[node] for node in nodes))
    return list(parts.values())


def _names(cluster: Cluster) -> tuple[str, ...]:
    return tuple(offer.instance_type.name for offer in cluster.members)


def _usd_per_second(cluster: Cluster) -> float:
    return max(cluster.total_usd_per_hour or 0.0, 1e-12) / 3600


def _buy(
    limits: CampaignLimits,
    clusters: Sequence[Cluster],
    runs: Sequence[PlannedRun],
    known: Knowledge,
    workloads: Mapping[str, Workload],
) -> list[PlannedLaunch]:
    """Buy launch after launch, the best value per share of the caps first."""
    left, costs = list(runs), limits.costs
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
            filling = _Filling(cluster=cluster, known=known, workloads=workloads, costs=costs)
            picked, per_s = filling.fill(valued, min(share, usd / price))
            value = per_s / max(1 / seconds, price / usd)
            if picked and (best is None or value > most * (1 + ROUNDING)):
                best, most = (cluster, picked), value
        if best is None and not covering:
            break
        covering = covering[1:]
        if best is None:
            continue
        cluster, picked = best
        reasons = [replace(run, reason=known.reason(run)) for run in picked]
        launch = launch_of(cluster, reasons, costs)
        for run in picked:
            known.add(run)
        bought = set(picked)
        left = [run for run in left if run not in bought]
        launches.append(launch)
        known.revalue()
        seconds -= launch.est_s
        usd -= launch.est_usd
    return launches


def _covering(clusters: Sequence[Cluster], known: Knowledge) -> list[Cluster]:
    """Return few clusters that hold every instance type with a profile to buy (greedy cover)."""
    types = [set(_names(cluster)) for cluster in clusters]
    missing = {name for _, name in known.unprofiled(set().union(*types))}
    cover: list[Cluster] = []
    while missing:
        best = max(
            range(len(clusters)),
            key=lambda at: (
                len(missing & types[at]),
                len(types[at]),
                len(clusters[at].members),
                -at,
            ),
        )
        cover.append(clusters[best])
        missing -= types[best]
    return cover


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filling:
    """The choice of runs for one launch of `cluster`."""

    cluster: Cluster
    known: Knowledge
    workloads: Mapping[str, Workload]
    costs: Costs

    def fill(
        self, valued: Mapping[tuple[str, ...], Sequence[tuple[float, PlannedRun]]], most_s: float
    ) -> tuple[list[PlannedRun], float]:
        """Return the best runs within `most_s`, the start included, and their value a billed
        second.

        Missing profiles come first, then sweeps of collectives, then training runs by value per
        second (lazily re-valued: values only fall) until one more has less than the launch so far.
        Seconds within the minimum bill cost nothing.
        """
        schedule, trial, costs = Schedule.of(self.cluster), self.known.copy(), self.costs
        left_s = most_s - costs.launch_s
        chosen: list[PlannedRun] = []
        for run in self._before_training():
            if schedule.seconds + schedule.extra_s(run) <= left_s:
                chosen.append(run)
                schedule.add(run)
                trial.add(run)
        total = _PROBE_VALUE * sum(run.kind == "probe" for run in chosen)
        free_s = max(schedule.alone_s)  # profiles are bought anyway: no run is weighed by them
        parts = sub_clusters(_names(self.cluster))
        runs = [pair for members in parts for pair in valued.get(members, ()) if pair[0] > 0]
        heap = [(-_per_second(value, run), at) for at, (value, run) in enumerate(runs)]
        heapq.heapify(heap)
        trains: list[PlannedRun] = []
        while heap:
            _, at = heapq.heappop(heap)
            run = runs[at][1]
            if schedule.seconds + schedule.extra_s(run) > left_s:
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
        return [*chosen, *_alternating(trains)], total / costs.billed_s(schedule.seconds - free_s)

    def _before_training(self) -> list[PlannedRun]:
        """Return missing profiles, and sweeps over two machines and over all."""
        kinds = {offer.instance_type.name: offer.instance_type for offer in self.cluster.members}
        profiles = [
            profile_of(replace(self.workloads[workload], modes=(mode,)), kinds[name], self.costs)
            for (workload, mode), name in self.known.unprofiled(kinds)
        ]
        names = _names(self.cluster)
        sweeps = [
            probe_of(members, self.costs)
            for members in dict.fromkeys([names[:2], names])
            if len(members) > 1
            and members not in self.known.probed
            and self.known.explores(members)
        ]
        return [*profiles, *sweeps]


def _per_second(value: float, run: PlannedRun) -> float:
    """Return value per second to six digits, so that rounding orders nothing."""
    return float(f"{value / run.est_s:.6g}")


def _alternating(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Order runs by turns of workloads: cut short anywhere, all of them have been served."""
    turns: Counter[Trained] = Counter()
    keyed = []
    for run in runs:
        keyed.append((turns[run.trained], run.trained, run))
        turns[run.trained] += 1
    return [run for *_, run in sorted(keyed, key=lambda key: key[:2])]
