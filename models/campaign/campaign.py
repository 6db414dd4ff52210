"""Which runs to buy next under a cap of dollars and seconds, grouped so that one launch serves many. Never buys any.

The value of a run is what it adds to what is known, with diminishing returns, more where predictions are uncertain,
less off the global batch, per second it takes:

    value = sum over features f of weight_f / (1 + runs that share f)                   what no model has met yet
    value = expected fall of the regret of the table's choices                what the model knows

First every workload is profiled on every instance type, by few launches that hold all types: unsharded, whether or not
it tolerates to be trained so. Then the launch follows with the best value per part of the caps that it uses up (dollars
or seconds, whichever it uses more of), and so on; a launch ends where one more run would lower its value per second.
Where no run is expected to change a choice, the list ends, however much is left.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

from ..domain.cluster import Cluster, Offer, parse_cluster, parse_numbers
from ..domain.numeric import ROUNDING
from ..domain.setup_table import Key
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
from .run_value import Coverage, DecisionValue, Model, Past, stale_types
from .value_of_information import LEAST_CHANCE, LEAST_REGRET

MOST_CLUSTERS = 600  # that one campaign weighs against each other
_ELASTIC_WORK_S = 30.0
_LEARNING_PART = 2 / 3  # of the caps, at most, for runs that show what is learned
STOPS = (
    "the campaign stops: no launch that the caps still pay for is expected to change a choice of the table (a run"
    f" counts for a goal if it changes its choice in {LEAST_CHANCE:.0%} of outcomes and saves {LEAST_REGRET:.1%})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignLimits:
    """What launches may cost together, and where: in `market`, of at most `max_hosts` machines, as `fits` lets them."""

    max_usd: float
    max_seconds: float
    max_hosts: int
    fits: Refusal
    seed: int
    market: str = "spot"
    costs: Costs = field(default_factory=Costs)
    most_launches: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLaunch:
    """One cluster to acquire and what it serves, in order. `est_s` includes starting it."""

    cluster: Cluster
    items: tuple[PlannedRun, ...]
    est_s: float
    est_usd: float
    reason: str


def shopping_list(
    campaign: CampaignLimits,
    workloads: Sequence[Workload],
    offers: Sequence[Offer],
    past: Past,
    *,
    model: Model | None = None,
    buyable: Mapping[Key, PlannedRun] | None = None,
) -> list[PlannedLaunch]:
    """Launches of `campaign` to make, in order, whose estimates add up to at most its dollars and seconds.

    A setup with a steady run in the `past` that is not stale is known well and not repeated; one that was interrupted
    may come again, one that failed twice may not. What was measured on a drifting instance type comes first. An offer
    without a price, or of another market, is not bought. Workloads and types that `model` has met are measured only
    where that is expected to change a choice; drifting types, and those of which all runs are stale, count as not met.
    `buyable` are the training runs that may be bought, where not all that `training_runs` names. The same arguments
    give the same list.
    """
    priced = [
        offer
        for offer in offers
        if offer.market == campaign.market and offer.usd_per_hour is not None
    ]
    if campaign.max_usd <= 0 or campaign.max_seconds <= 0 or not priced or not workloads:
        return []
    workloads = in_each_mode(workloads)
    clusters = list(
        clusters_of(priced, max_hosts=campaign.max_hosts, fits=campaign.fits, most=MOST_CLUSTERS)
    )
    candidates = buyable
    if candidates is None:
        parts, expected = (
            list(_parts(clusters).values()),
            None if model is None else model.expected_step,
        )
        candidates = training_runs(
            workloads, parts, past.profiles, expected_step=expected, costs=campaign.costs
        )
    layouts = {offer.instance_type.name: offer.instance_type.devices for offer in priced}
    known = Coverage.of(
        [*workloads, *_only_profiled(workloads)], past, layouts=layouts, seed=campaign.seed
    )
    wanted = {
        (_trained(_profiled_as(one)), offer.instance_type.name)
        for one, offer in product(workloads, priced)
        if computes(offer.instance_type.device, one.modes[0])
    }
    known.profiled |= set(product(known.workloads, layouts)) - wanted
    left = [candidate for key, candidate in candidates.items() if key not in known.settled]
    if model is not None:
        types = model.types - past.drifting.keys() - stale_types(past.runs, past.stale_before)
        known.decision_value = DecisionValue.of(replace(model, types=types), left, layouts=layouts)
    return _buy(campaign, clusters, left, known)


def learning_launches(
    campaign: CampaignLimits, wanted: Sequence[tuple[Workload, Mode]], offers: Sequence[Offer]
) -> list[PlannedLaunch]:
    """A launch a workload with the learning runs of its modes `wanted`, on the two machines of one type that cost least
    for it, as many of them as are paid for; together they take at most _LEARNING_PART of the caps.

    None for modes that no two machines on offer can train, and for what that part does not pay: the rest of the caps is
    other runs', and so is all that learning leaves.
    """
    priced = [
        one
        for one in offers
        if one.market == campaign.market and one.total_usd_per_hour is not None
    ]
    pairs = [Cluster(members=(one, one)) for one in priced] if campaign.max_hosts > 1 else []
    pairs = [one for one in sorted(pairs, key=_usd_per_second) if not campaign.fits(one)]
    seconds, usd = campaign.max_seconds * _LEARNING_PART, campaign.max_usd * _LEARNING_PART
    found: list[PlannedLaunch] = []
    for name in dict.fromkeys(workload.name for workload, _ in wanted):
        asked = [one for one in wanted if one[0].name == name]
        for few, pair in product(range(len(asked), 0, -1), pairs):
            runs = _learning_of(asked[:few], pair, campaign.costs)
            est_s = campaign.costs.billed_s(sum(one.est_s for one in runs))
            est_usd = est_s * _usd_per_second(pair)
            if runs and est_s <= seconds and est_usd <= usd:
                seconds, usd = seconds - est_s, usd - est_usd
                reason = f"what {name} learns in {', '.join(str(mode) for _, mode in asked[:few])}"
                found.append(
                    PlannedLaunch(
                        cluster=pair, items=tuple(runs), est_s=est_s, est_usd=est_usd, reason=reason
                    )
                )
                break
    return found


def elastic_launch(
    campaign: CampaignLimits, recommended: Mapping[str, Any], offers: Sequence[Offer]
) -> PlannedLaunch | None:
    """A launch of a row of the table on its own machines, of which the last is taken away and the first, on demand, is
    not: what a loss costs is learned by it. Of about _ELASTIC_WORK_S of steps, with ten checkpoints.

    None for one machine, for a strategy or switches whose state is not whole on each device, and for machines that are
    not on offer.
    """
    types = parse_cluster(recommended["cluster"]) if isinstance(recommended["cluster"], str) else ()
    if len(types) < 2:
        return None
    mode = Mode(*(str(recommended[name]) for name in Mode._fields))
    named = {(one.instance_type.name, one.market): one for one in reversed(offers)}
    wanted = [(name, "spot" if at else "on-demand") for at, name in enumerate(types)]
    if (mode.strategy, mode.switches) != (Mode().strategy, Mode().switches) or any(
        one not in named for one in wanted
    ):
        return None
    cluster = Cluster(members=tuple(named[one] for one in wanted))
    if campaign.fits(cluster):
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
        # with a machine less, each of the steps that are left takes longer: at most as much as two machines' share
        est_s=10 * every * step_s * len(types) / (len(types) - 1) + max(PRIOR_S.values()),
        reason="what the loss of a machine costs",
    )
    est_s = campaign.costs.billed_s(run.est_s)
    price = _usd_per_second(cluster)
    return PlannedLaunch(
        cluster=cluster, items=(run,), est_s=est_s, est_usd=est_s * price, reason=run.reason
    )


def _learning_of(
    wanted: Sequence[tuple[Workload, Mode]], cluster: Cluster, costs: Costs
) -> list[PlannedRun]:
    """Runs of all the modes on one cluster; those of the dense mode, which several are compared with, once."""
    runs = [
        run for workload, mode in wanted for run in learning_runs(workload, mode, cluster, costs)
    ]
    return list({(run.trained, run.seed): run for run in reversed(runs)}.values())[::-1]


def after(campaign: CampaignLimits, launches: Sequence[PlannedLaunch]) -> CampaignLimits:
    """The `campaign` with the caps that these launches leave."""
    seconds, usd = sum(one.est_s for one in launches), sum(one.est_usd for one in launches)
    return replace(
        campaign, max_seconds=campaign.max_seconds - seconds, max_usd=campaign.max_usd - usd
    )


def in_each_mode(workloads: Iterable[Workload]) -> list[Workload]:
    """Each workload once for each of its modes, in that mode alone."""
    return [replace(one, modes=(mode,)) for one in workloads for mode in one.modes]


def _trained(workload: Workload) -> Trained:
    return workload.name, workload.modes[0]


def _only_profiled(workloads: Sequence[Workload]) -> list[Workload]:
    """What modes of several devices among `workloads` are profiled as and is not among them: never trained itself."""
    met = {_trained(one) for one in workloads}
    alone = {_trained(_profiled_as(one)): _profiled_as(one) for one in workloads}
    return [one for trained, one in alone.items() if trained not in met]


def _profiled_as(workload: Workload) -> Workload:
    """The workload in its mode of one device, which shares nothing."""
    mode = workload.modes[0]
    return replace(workload, modes=(mode.alone,)) if mode.of_several else workload


def _parts(clusters: Sequence[Cluster]) -> dict[tuple[str, ...], Cluster]:
    """Every sub-cluster that some cluster can serve, by its instance types."""
    parts: dict[tuple[str, ...], Cluster] = {}
    for cluster in clusters:
        for members, nodes in sub_clusters(cluster).items():
            parts.setdefault(
                members, Cluster(members=tuple(cluster.members[node] for node in nodes))
            )
    return parts


def _buy(
    campaign: CampaignLimits,
    clusters: Sequence[Cluster],
    candidates: Iterable[PlannedRun],
    known: Coverage,
) -> list[PlannedLaunch]:
    """PlannedLaunch after launch, the best value per part of the caps first, until nothing has any value or can be paid."""
    by_members: dict[tuple[str, ...], list[PlannedRun]] = {}
    for candidate in candidates:
        by_members.setdefault(candidate.members, []).append(candidate)
    covering = _covering(clusters, known)
    launches: list[PlannedLaunch] = []
    seconds, usd, costs = campaign.max_seconds, campaign.max_usd, campaign.costs
    while seconds > 0 and usd > 0:
        first = covering[:1] or clusters
        share = seconds / len(covering) if covering else seconds
        best: tuple[Cluster, Filled] | None = None
        most, runs = 0.0, rated(by_members, known)
        for cluster in first:
            price = _usd_per_second(cluster)
            if costs.minimum_s * price > usd:
                continue
            filled = fill(cluster, runs, known, most_s=min(share, usd / price), costs=costs)
            value = filled.value_per_s / max(1 / seconds, price / usd)
            if filled.candidates and (best is None or value > most * (1 + ROUNDING)):
                best, most = (cluster, filled), value
        if covering:
            covering = covering[1:]
        elif best is None:
            break
        if best is None:
            continue
        cluster, filled = best
        launch = _launch(cluster, filled.candidates, known, costs)
        for candidate in filled.candidates:
            known.add(candidate)
            if candidate.kind == "train":
                by_members[candidate.members].remove(candidate)
        launches.append(launch)
        if len(launches) == campaign.most_launches:
            break
        if known.decision_value is not None:
            known.decision_value.revalue()
        seconds -= launch.est_s
        usd -= launch.est_usd
    return launches


def _covering(clusters: Sequence[Cluster], known: Coverage) -> list[Cluster]:
    """Few clusters that together hold every instance type on which some workload was never profiled (greedy cover)."""
    missing = {
        name
        for _, name in known.unprofiled({o.instance_type.name for c in clusters for o in c.members})
    }
    cover: list[Cluster] = []
    while missing:
        gains = [
            (len(missing & _types(cluster)), len(_types(cluster)), len(cluster.members))
            for cluster in clusters
        ]
        best = max(range(len(clusters)), key=lambda i: (gains[i], -i))
        cover.append(clusters[best])
        missing -= _types(clusters[best])
    return cover


def _types(cluster: Cluster) -> set[str]:
    return {offer.instance_type.name for offer in cluster.members}


def _usd_per_second(cluster: Cluster) -> float:
    return max(cluster.total_usd_per_hour or 0.0, 1e-12) / 3600


def _launch(
    cluster: Cluster, candidates: Sequence[PlannedRun], known: Coverage, costs: Costs
) -> PlannedLaunch:
    return launch_of(cluster, [replace(one, reason=known.reason(one)) for one in candidates], costs)


def launch_of(cluster: Cluster, items: Sequence[PlannedRun], costs: Costs) -> PlannedLaunch:
    """One launch of `cluster` for these runs, those of one machine first, each on the first machines that serve it."""
    ordered, run_s = in_order(cluster, items)
    return PlannedLaunch(
        cluster=cluster,
        items=tuple(replace(item, nodes=nodes) for item, nodes in ordered),
        est_s=costs.launch_s + run_s,
        est_usd=costs.billed_s(run_s) * _usd_per_second(cluster),
        reason=_reason(items),
    )


def _reason(candidates: Sequence[PlannedRun]) -> str:
    said = []
    for kind, singular, plural in (
        ("profile", "profile of a workload on a machine", "profiles of workloads on machines"),
        ("probe", "sweep of collectives", "sweeps of collectives"),
        ("train", "training run", "training runs"),
    ):
        count = sum(candidate.kind == kind for candidate in candidates)
        if count:
            said.append(f"{count} {singular if count == 1 else plural}")
    clusters = len({candidate.members for candidate in candidates})
    return f"{', '.join(said)} on {clusters} cluster{'s' if clusters > 1 else ''} from one launch"


_PROBE_VALUE = 1.5  # a sweep serves every workload on its cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """What a launch would measure, in order, and its value a second."""

    candidates: tuple[PlannedRun, ...]
    value_per_s: float  # of a billed second


Rated = Callable[[tuple[str, ...]], Sequence[tuple[float, PlannedRun]]]


def rated(by_members: Mapping[tuple[str, ...], Sequence[PlannedRun]], known: Coverage) -> Rated:
    """The runs of each sub-cluster that have any value now, and how much. Many clusters ask about the same one."""

    @cache
    def of(members: tuple[str, ...]) -> list[tuple[float, PlannedRun]]:
        valued = [(known.value(candidate), candidate) for candidate in by_members.get(members, ())]
        return [one for one in valued if one[0] > 0]

    return of


def fill(cluster: Cluster, runs: Rated, known: Coverage, *, most_s: float, costs: Costs) -> Filled:
    """The best that `cluster` can measure within `most_s` seconds, its start included; empty where that is too little.

    Profiles that are missing come first, then a sweep of collectives over two machines and over all (unless known),
    then training runs by value per second (lazily re-valued: values only fall as runs are added) until one more has
    less value per second than the launch so far. Runs of no value are left out; seconds within the minimum bill
    cost nothing. `runs` are rated by what is `known`.
    """
    schedule = Schedule.of(cluster)
    left = most_s - costs.launch_s
    trial = known.copy()
    parts = sub_clusters(cluster)
    chosen: list[PlannedRun] = []
    for candidate in _before_training(cluster, parts, trial, costs):
        if schedule.seconds + schedule.extra_s(candidate) <= left:
            chosen.append(candidate)
            schedule.add(candidate)
            trial.add(candidate)
    probing = [candidate for candidate in chosen if candidate.kind == "probe"]
    total, must_s = (
        _PROBE_VALUE * len(probing),
        max(schedule.alone_s),
    )  # profiles must be: no run is weighed by them
    trains: list[PlannedRun] = []
    candidates = [one for members in parts for one in runs(members)]
    heap = [
        (-_per_second(value, candidate), place)
        for place, (value, candidate) in enumerate(candidates)
    ]
    heapq.heapify(heap)
    while heap:
        _, place = heapq.heappop(heap)
        candidate = candidates[place][1]
        if schedule.seconds + schedule.extra_s(candidate) > left:
            continue
        value = trial.value(candidate)
        if heap and -_per_second(value, candidate) > heap[0][0]:
            heapq.heappush(heap, (-_per_second(value, candidate), place))
            continue
        spent, more = (
            costs.billed_s(schedule.seconds - must_s + one) for one in (0.0, candidate.est_s)
        )
        if value <= 0 or (more > spent and value / candidate.est_s < total / spent):
            break
        trains.append(candidate)
        schedule.add(candidate)
        trial.add(candidate)
        total += value
    if not trains and not any(candidate.kind == "profile" for candidate in chosen):
        return Filled(candidates=(), value_per_s=0.0)
    spent = costs.billed_s(schedule.seconds - must_s)
    return Filled(
        candidates=(*chosen, *_alternating(trains, list(trial.workloads))),
        value_per_s=total / spent,
    )


def _per_second(value: float, candidate: PlannedRun) -> float:
    """To six digits: what differs by rounding alone is equal, and the first of equal ones is taken."""
    return float(f"{value / candidate.est_s:.6g}")


def _before_training(
    cluster: Cluster, parts: Iterable[tuple[str, ...]], known: Coverage, costs: Costs
) -> list[PlannedRun]:
    """Profiles and sweeps of collectives that nobody has of `cluster`, in order."""
    kinds = {offer.instance_type.name: offer.instance_type for offer in cluster.members}
    unprofiled = known.unprofiled({members[0] for members in parts if len(members) == 1})
    profiles = [
        profile_of(known.workloads[workload], kinds[name], costs) for workload, name in unprofiled
    ]
    names = tuple(offer.instance_type.name for offer in cluster.members)
    probed = sorted(
        {names[:2], names} - {names[:1]}, key=len
    )  # sizes between follow from the two ends
    sweeps = [
        probe_of(one, costs) for one in probed if one not in known.probed and known.explores(one)
    ]
    return [*profiles, *sweeps]


def _alternating(trains: Sequence[PlannedRun], workloads: Sequence[Trained]) -> list[PlannedRun]:
    """Workloads by turns, each in its own order: cut short anywhere, all of them have been served alike."""
    before: Counter[Trained] = Counter()
    keyed = []
    for candidate in trains:
        keyed.append(((before[candidate.trained], workloads.index(candidate.trained)), candidate))
        before[candidate.trained] += 1
    return [candidate for _, candidate in sorted(keyed, key=lambda pair: pair[0])]
