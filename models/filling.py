"""A launch filled with the runs that are worth most a second."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from .cloud import Cluster
from .knowledge import Knowledge
from .schedule import Schedule
from .wants import Costs, Want, probe_want, profile_want, sub_clusters
from .workload import Workload

_PROBE_WORTH = 1.5  # a sweep serves every workload on its cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """What a launch would measure, in order, and what it is worth a second."""

    wants: tuple[Want, ...]
    worth: float  # of a billed second


Rated = Callable[[tuple[str, ...]], Sequence[tuple[float, Want]]]


def rated(by_members: Mapping[tuple[str, ...], Sequence[Want]], known: Knowledge) -> Rated:
    """The runs of each sub-cluster that are worth anything now, and how much. Many clusters ask about the same one."""

    @cache
    def of(members: tuple[str, ...]) -> list[tuple[float, Want]]:
        valued = [(known.value(want), want) for want in by_members.get(members, ())]
        return [one for one in valued if one[0] > 0]

    return of


def fill(
    cluster: Cluster,
    workloads: Sequence[Workload],
    runs: Rated,
    known: Knowledge,
    *,
    most_s: float,
    costs: Costs,
) -> Filled:
    """The best that `cluster` can measure within `most_s` seconds, its start included; empty where that is too little.

    Profiles that are missing come first, then a sweep of collectives over two machines and over all (unless known),
    then training runs by value per second (lazily re-valued: values only fall as runs are added) until one more is
    worth less per second than the launch so far. Runs of no worth are left out; seconds that the minimum bills anyway
    cost nothing. `runs` are rated by what is `known`.
    """
    schedule = Schedule.of(cluster)
    left = most_s - costs.launch_s
    trial = known.copy()
    parts = sub_clusters(cluster)
    chosen: list[Want] = []
    for want in _before_training(cluster, parts, workloads, trial, costs):
        if schedule.seconds + schedule.extra_s(want) <= left:
            chosen.append(want)
            schedule.add(want)
            trial.add(want)
    probing = [want for want in chosen if want.kind == "probe"]
    worth, must_s = _PROBE_WORTH * len(probing), max(schedule.alone_s)  # profiles must be: no run is weighed by them
    trains: list[Want] = []
    wants = [one for members in parts for one in runs(members)]
    heap = [(-value / want.est_s, place) for place, (value, want) in enumerate(wants)]
    heapq.heapify(heap)
    while heap:
        _, place = heapq.heappop(heap)
        want = wants[place][1]
        if schedule.seconds + schedule.extra_s(want) > left:
            continue
        value = trial.value(want)
        if heap and -value / want.est_s > heap[0][0]:
            heapq.heappush(heap, (-value / want.est_s, place))
            continue
        spent, more = (costs.billed_s(schedule.seconds - must_s + one) for one in (0.0, want.est_s))
        if value <= 0 or (more > spent and value / want.est_s < worth / spent):
            break
        trains.append(want)
        schedule.add(want)
        trial.add(want)
        worth += value
    if not trains and not any(want.kind == "profile" for want in chosen):
        return Filled(wants=(), worth=0.0)
    spent = costs.billed_s(schedule.seconds - must_s)
    return Filled(wants=(*chosen, *_alternating(trains, trial.workloads)), worth=worth / spent)


def _before_training(
    cluster: Cluster,
    parts: Iterable[tuple[str, ...]],
    workloads: Sequence[Workload],
    known: Knowledge,
    costs: Costs,
) -> list[Want]:
    """Profiles and sweeps of collectives that nobody has of `cluster`, in order."""
    sized = {workload.name: workload for workload in workloads}
    kinds = {offer.instance_type.name: offer.instance_type for offer in cluster.members}
    unprofiled = known.unprofiled({members[0] for members in parts if len(members) == 1})
    profiles = [profile_want(sized[workload], kinds[name], costs) for workload, name in unprofiled]
    names = tuple(offer.instance_type.name for offer in cluster.members)
    probed = sorted({names[:2], names} - {names[:1]}, key=len)  # sizes between follow from the two ends
    sweeps = [probe_want(one, costs) for one in probed if one not in known.probed and known.explores(one)]
    return [*profiles, *sweeps]


def _alternating(trains: Sequence[Want], workloads: Sequence[str]) -> list[Want]:
    """Workloads by turns, each in its own order: cut short anywhere, all of them have been served alike."""
    turn: Counter[str] = Counter()
    keyed = []
    for want in trains:
        keyed.append(((turn[want.workload], workloads.index(want.workload)), want))
        turn[want.workload] += 1
    return [want for _, want in sorted(keyed, key=lambda pair: pair[0])]
