"""Which runs to buy next under a cap of dollars and seconds, grouped so that one launch serves many. Never buys any.

A run is worth what it adds to what is known, with diminishing returns, more where predictions are uncertain and less
off the global batch, per second it takes:

    value = sum over features f of weight_f / (1 + runs that share f)                   what no model has met yet
    value = expected fall of the regret of the table's choices (worth.py)               what the model knows

First every workload is profiled on every instance type, by few launches that hold all types. Then the launch follows
with the best value per part of the caps that it uses up (dollars or seconds, whichever it uses more of), and so on; a
launch ends where one more run is worth less per second than it is. Where no run is expected to change a choice, the
list ends, however much is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import pandas as pd

from .appraisal import Appraisal, Joint
from .cloud import Cluster, Offer
from .clusters import Refusal, clusters_of
from .contenders import Contenders
from .filling import Filled, fill, rated
from .identity import Key
from .knowledge import Knowledge
from .moments import gone_stale
from .schedule import in_order
from .wants import Costs, Expected, Want, sub_clusters, train_wants
from .workload import Workload
from .worth import LEAST_CHANCE, LEAST_REGRET

MOST_CLUSTERS = 600  # that one campaign weighs against each other
STOPS = (
    "the campaign stops: no launch that the caps still pay for is expected to change a choice of the table (a run"
    f" counts for a goal if it changes its choice in {LEAST_CHANCE:.0%} of outcomes and saves {LEAST_REGRET:.1%})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One line of the list: what to measure on which nodes of the launch, why, and the seconds expected for it.

    `kind` is "train", "profile" or "probe"; `batches` are samples per device, one a node (profile: batches to try);
    `devices` are used on each node, empty: one each.
    """

    kind: str
    workload: str
    nodes: tuple[int, ...]
    batches: tuple[int, ...]
    accumulation_steps: int
    message_bytes: tuple[int, ...]
    reason: str
    est_s: float
    devices: tuple[int, ...] = ()

    @property
    def layout(self) -> tuple[int, ...]:
        """Devices used on each node."""
        return self.devices or (1,) * len(self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What the model in force says: who may be chosen in each workload that it has met, and step times jointly.

    `types` are the instance types that it has met; `fresh` are runs that it has not learned from.
    """

    contenders: Mapping[str, Contenders]
    joint: Joint
    types: frozenset[str]
    fresh: pd.DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One cluster to acquire and what it serves, in order. `est_s` includes starting it."""

    cluster: Cluster
    items: tuple[Wanted, ...]
    est_s: float
    est_usd: float
    reason: str


def shopping_list(
    workloads: Sequence[Workload],
    offers: Sequence[Offer],
    runs: pd.DataFrame,
    profiles: pd.DataFrame,
    probes: pd.DataFrame,
    *,
    max_usd: float,
    max_seconds: float,
    max_hosts: int,
    fits: Refusal,
    seed: int,
    market: str = "spot",
    expected_step: Expected | None = None,
    batches: Mapping[str, Sequence[int]] | None = None,
    stale_before: datetime | None = None,
    costs: Costs | None = None,
    failures: pd.DataFrame | None = None,
    drifting: Mapping[str, datetime] | None = None,
    model: Model | None = None,
) -> list[Launch]:
    """Launches to make, in order, whose estimates add up to at most `max_usd` dollars and `max_seconds` seconds.

    `runs`, `profiles` and `probes` are past matching measurements of this provider (the marts' columns; empty frames
    where there are none). A setup with a steady run that is not older than `stale_before` is known well and not
    repeated; one that was interrupted may come again, one that failed twice (`failures`: kind and the columns of runs)
    may not. What was measured on a `drifting` instance type up to the time given for it is known no more, and comes
    first. `expected_step` predicts setups
    (step_s, step_low_s, step_high_s); `batches` are global batches by workload where not those of its range. Machines
    are bought in `market`; an offer without a price, or of another market, is not bought. Workloads and types that
    `model` has met are measured only where that is expected to change a choice; drifting types, and those of which all
    runs are older than `stale_before`, count as not met. The same arguments give the same list.
    """
    priced = [offer for offer in offers if offer.market == market and offer.usd_per_hour is not None]
    if max_usd <= 0 or max_seconds <= 0 or not priced or not workloads:
        return []
    prices, drifting = costs or Costs(), drifting or {}
    clusters = list(clusters_of(priced, max_hosts=max_hosts, fits=fits, most=MOST_CLUSTERS))
    parts = _parts(clusters)
    wants = train_wants(
        workloads, list(parts.values()), profiles, batches=batches or {}, expected_step=expected_step, costs=prices
    )
    devices = {offer.instance_type.name: offer.instance_type.devices for offer in priced}
    known = Knowledge.of(
        workloads, runs, profiles, probes, devices=devices, stale_before=stale_before, seed=seed, drifting=drifting
    )
    if failures is not None:
        known.give_up(failures, devices)
    wants = {key: want for key, want in wants.items() if key not in known.settled}
    if model is not None:
        types = model.types - drifting.keys() - gone_stale(runs, stale_before)
        known.appraisal = Appraisal.of(
            model.contenders, wants.values(), model.joint, types=types, layouts=devices, fresh=model.fresh
        )
    return _buy(workloads, clusters, wants, known, max_usd=max_usd, max_seconds=max_seconds, costs=prices)


def _parts(clusters: Sequence[Cluster]) -> dict[tuple[str, ...], Cluster]:
    """Every sub-cluster that some cluster can serve, by its instance types."""
    parts: dict[tuple[str, ...], Cluster] = {}
    for cluster in clusters:
        for members, nodes in sub_clusters(cluster).items():
            parts.setdefault(members, Cluster(members=tuple(cluster.members[node] for node in nodes)))
    return parts


def _buy(
    workloads: Sequence[Workload],
    clusters: Sequence[Cluster],
    wants: Mapping[Key, Want],
    known: Knowledge,
    *,
    max_usd: float,
    max_seconds: float,
    costs: Costs,
) -> list[Launch]:
    """Launch after launch, the best value per part of the caps first, until nothing is worth or able to be paid."""
    by_members: dict[tuple[str, ...], list[Want]] = {}
    for want in wants.values():
        by_members.setdefault(want.members, []).append(want)
    covering = _covering(clusters, known)
    launches: list[Launch] = []
    seconds, usd = max_seconds, max_usd
    while True:
        first = covering[:1] or clusters
        share = seconds / len(covering) if covering else seconds
        best: tuple[Cluster, Filled] | None = None
        most, runs = 0.0, rated(by_members, known)
        for cluster in first:
            price = _usd_per_second(cluster)
            if costs.minimum_s * price > usd:
                continue
            filled = fill(cluster, workloads, runs, known, most_s=min(share, usd / price), costs=costs)
            worth = filled.worth / max(1 / seconds, price / usd)
            if filled.wants and (best is None or worth > most):
                best, most = (cluster, filled), worth
        if covering:
            covering = covering[1:]
        elif best is None:
            return launches
        if best is None:
            continue
        cluster, filled = best
        launch = _launch(cluster, filled.wants, known, costs)
        for want in filled.wants:
            known.add(want)
            if want.kind == "train":
                by_members[want.members].remove(want)
        if known.appraisal is not None:
            known.appraisal.again()
        launches.append(launch)
        seconds -= launch.est_s
        usd -= launch.est_usd


def _covering(clusters: Sequence[Cluster], known: Knowledge) -> list[Cluster]:
    """Few clusters that together hold every instance type on which some workload was never profiled (greedy cover)."""
    missing = {name for _, name in known.unprofiled({o.instance_type.name for c in clusters for o in c.members})}
    cover: list[Cluster] = []
    while missing:
        gains = [(len(missing & _types(cluster)), len(_types(cluster)), len(cluster.members)) for cluster in clusters]
        best = max(range(len(clusters)), key=lambda i: (gains[i], -i))
        cover.append(clusters[best])
        missing -= _types(clusters[best])
    return cover


def _types(cluster: Cluster) -> set[str]:
    return {offer.instance_type.name for offer in cluster.members}


def _usd_per_second(cluster: Cluster) -> float:
    return max(cluster.usd_per_hour or 0.0, 1e-12) / 3600


def _launch(cluster: Cluster, wants: Sequence[Want], known: Knowledge, costs: Costs) -> Launch:
    ordered, run_s = in_order(cluster, wants)
    items = tuple(
        Wanted(
            kind=want.kind,
            workload=want.workload,
            nodes=nodes,
            batches=want.batches,
            accumulation_steps=want.accumulation_steps,
            message_bytes=want.message_bytes,
            reason=known.reason(want),
            est_s=want.est_s,
            devices=want.devices,
        )
        for want, nodes in ordered
    )
    est_s = costs.launch_s + run_s
    return Launch(
        cluster=cluster,
        items=items,
        est_s=est_s,
        est_usd=costs.billed_s(run_s) * _usd_per_second(cluster),
        reason=_reason(wants),
    )


def _reason(wants: Sequence[Want]) -> str:
    said = []
    for kind, singular, plural in (
        ("profile", "profile of a workload on a machine", "profiles of workloads on machines"),
        ("probe", "sweep of collectives", "sweeps of collectives"),
        ("train", "training run", "training runs"),
    ):
        count = sum(want.kind == kind for want in wants)
        if count:
            said.append(f"{count} {singular if count == 1 else plural}")
    clusters = len({want.members for want in wants})
    return f"{', '.join(said)} on {clusters} cluster{'s' if clusters > 1 else ''} from one launch"
