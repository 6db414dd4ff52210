"""What `srift measure` buys: named clusters, or pilots of a workload's goals, as planned launches.

The caps, the leases, the checks and the loading are those of a campaign.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from models.campaign.campaign import PlannedLaunch, launch_of
from models.campaign.candidates import (
    Costs,
    PlannedRun,
    profile_of,
    profiled_lines,
    training_run,
    training_runs,
)
from models.domain.cluster import Cluster, Offer, parse_cluster
from models.domain.setup_table import rows_of
from models.domain.suggestions import nearest_names
from models.domain.workload import Goal
from models.planner import planner
from models.planner.candidates import Supply
from models.planner.enumeration import price_or_inf, sold_together
from models.planner.learning import vetoes
from warehouse import reads
from warehouse.database import WarehouseMissing

from ..execution.job import Served
from ..execution.outcomes import planned_id
from ..market.job_conditions import costs_of
from ..market.offers import current_offers
from ..recommendation.pilots import for_sale, pilots_for
from ..recommendation.recommend import Case, plan_one
from ..reporting.progress import reporter
from ..training.registry import Champion
from ..workspace.blas_threads import one_thread
from ..workspace.settings import SettingsError
from ..workspace.workspace import Workspace
from .budget import Tally
from .campaign import obstacle, outdating

Row = dict[str, Any]
_STEP = ("step_s", "step_low_s", "step_high_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A workload, and clusters such as 2xNAME+1xOTHER to measure it on, or at most `pilots`."""

    workload: str
    clusters: tuple[str, ...] = ()
    pilots: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wished:
    """Launches to make, and by run the champion's step_s with its interval."""

    launches: Sequence[PlannedLaunch]
    predicted: Mapping[PlannedRun, Row]


def clusters_of(workspace: Workspace, wish: Wish, offers: Sequence[Offer]) -> list[Cluster]:
    """Return the named clusters, each at its least price, in the campaign's market if sold there.

    Raises:
        SettingsError: for an unknown workload or type, a text that is no cluster, a type without a
            price, or a cluster that this installation does not launch.
    """
    able = {workload.name for workload in workspace.measurable}
    if wish.workload not in able:
        if wish.workload in workspace.settings.workloads:
            raise SettingsError(
                f"{wish.workload} has no entrypoint: state one under [workloads.{wish.workload}] in"
                " srift.toml, or `srift import` measurements of it"
            )
        raise SettingsError(
            f"unknown workload {wish.workload!r}; {nearest_names(wish.workload, able)}"
        )
    sold = for_sale(workspace, offers)
    clusters = [_cluster(workspace, text, offers, sold) for text in wish.clusters]
    return list({cluster.name: cluster for cluster in clusters}.values())


def launches_for(
    workspace: Workspace, champion: Champion | None, wish: Wish, offers: Sequence[Offer]
) -> Wished:
    """Return the launches of `wish`; says why a goal has no pilots. Raises as `clusters_of`."""
    clusters = clusters_of(workspace, wish, offers)
    workload = workspace.settings.workload(wish.workload)
    costs = costs_of(workspace)
    with one_thread():
        case = Case.of(workspace, champion, workload, offers)
        if clusters:
            launches = [launch_of(one, _runs_on(case, one, costs), costs) for one in clusters]
        else:
            launches = _pilots(case, wish.pilots, costs)
        return Wished(launches=launches, predicted=_predicted(case, launches))


def affordable(workspace: Workspace, wished: Wished, tally: Tally) -> Iterator[PlannedLaunch]:
    """Yield launches that may be made; note in `tally` why others may not."""
    offers, warning = current_offers(workspace), outdating(workspace)
    reporter().start(sum(len(launch.items) for launch in wished.launches))
    for launch in wished.launches:
        if why := obstacle(workspace, launch, tally, offers):
            tally.notes.append(f"{launch.cluster.name} was not launched: {why}")
            reporter().say(tally.notes[-1])
            continue
        if warning:
            reporter().say(warning)
            warning = ""
        yield launch
    reporter().stop()


def outcomes(
    workspace: Workspace, wished: Wished, made: Sequence[tuple[PlannedLaunch, Served]]
) -> list[Row]:
    """Return a row for each run of the launches `made`: its step predicted and measured, or why
    not.
    """
    provider = workspace.provider.name
    runs = _mart(workspace, "runs", provider=provider, source="srift")
    failures = _mart(workspace, "failed_runs", provider=provider)
    measured = {planned_id(row["run_id"]): float(row["step_s"]) for row in rows_of(runs)}
    failed = {planned_id(row["run_id"]): str(row["reason"]) for row in rows_of(failures)}
    rows = []
    for launch, served in made:
        recorded = {planned_id(run_id) for run_id in served.recorded}
        for number, run in enumerate(launch.items):
            run_id = f"{served.lease_id}-{number:03d}"
            step_s, reason = measured.get(run_id), ""
            if step_s is None:
                reason = failed.get(run_id, "" if run_id in recorded else served.outcome)
                if run.kind == "train" and not reason:
                    reason = "stored under a definition of the workload or machines that changed"
            predicted = wished.predicted.get(_bare(run), {})
            rows.append(
                {
                    "run_id": run_id,
                    "kind": run.kind,
                    **run.row(),
                    "market": launch.cluster.members[0].market,
                    **{f"predicted_{column}": predicted.get(column) for column in _STEP},
                    "step_s": step_s,
                    "measured": step_s is not None or (run_id in recorded and not reason),
                    "reason": reason,
                }
            )
    return rows


def _mart(workspace: Workspace, name: str, **equal: str) -> pd.DataFrame:
    try:
        return reads.mart(workspace.warehouse, name, **equal)
    except WarehouseMissing:
        return pd.DataFrame()


def _cluster(
    workspace: Workspace, text: str, offers: Sequence[Offer], sold: Sequence[Offer]
) -> Cluster:
    known = {offer.instance_type.name for offer in offers}
    try:
        names = parse_cluster(text)
    except ValueError as error:
        meant = f"; did you mean 1x{text}?" if text in known else ""
        raise SettingsError(f"--on {text}: {error}{meant}") from None
    for name in names:
        if name not in known:
            near = nearest_names(name, known)
            raise SettingsError(f"--on {text}: no instance type {name!r} is on offer; {near}")
    cluster = _cheapest(names, sold) or _cheapest(names, offers)
    if cluster is None:
        raise SettingsError(f"--on {text}: not sold with a known price in one zone and market")
    if why := _not_launched(workspace, cluster):
        smaller = [Cluster(members=cluster.members[:n]) for n in range(len(names) - 1, 0, -1)]
        fits = [one.name for one in smaller if not _not_launched(workspace, one)]
        largest = f"; the largest part that fits is {fits[0]}" if fits else ""
        raise SettingsError(f"--on {text}: {why.rstrip('.')}{largest}")
    return cluster


def _not_launched(workspace: Workspace, cluster: Cluster) -> str:
    most = workspace.settings.campaign.max_hosts
    if len(cluster.members) > most:
        return f"a campaign launches at most {most} machines ([campaign] max_hosts)"
    return workspace.launches(cluster)


def _runs_on(case: Case, cluster: Cluster, costs: Costs) -> list[PlannedRun]:
    """Return missing profiles and a training run of the quickest setup that the model expects.

    If it knows too little: of the first mode on all devices at the least global batch.

    Raises:
        SettingsError: if the cluster cannot train the workload.
    """
    run = _quickest(case, cluster, costs)
    if run is None:
        first = replace(case.workload, modes=case.workload.modes[:1])
        found = training_runs([first], [cluster], pd.DataFrame(), costs=costs)
        whole = tuple(offer.instance_type.devices for offer in cluster.members)
        exact = [one for one in found.values() if one.exact and one.layout == whole]
        if not exact:
            raise SettingsError(
                f"{cluster.name} cannot train {first.name}: its {sum(whole)} devices cannot share a"
                f" global batch of {first.global_batch_least}, or do not compute in its precision"
            )
        run = min(exact, key=lambda one: one.accumulation_steps)
    alone = replace(case.workload, modes=(run.mode.alone,))
    profiles = _mart(case.workspace, "profiles", provider=case.workspace.provider.name)
    lines = profiled_lines(profiles)
    types = {offer.instance_type.name: offer.instance_type for offer in cluster.members}
    missing = [
        profile_of(alone, instance_type, costs)
        for name, instance_type in types.items()
        if (alone.name, run.mode.alone, name) not in lines
    ]
    return [replace(one, reason="named by hand") for one in (*missing, run)]


def _quickest(case: Case, cluster: Cluster, costs: Costs) -> PlannedRun | None:
    """Return None if the model does not know the workload or a type as it is defined now."""
    by_name = {offer.instance_type.name: offer for offer in cluster.members}
    if case.model is None or not by_name.keys() <= _known(case):
        return None
    learned = reads.learning(case.workspace.warehouse, case.workspace.provider.name)
    supply = Supply(
        offers=list(by_name.values()),
        max_hosts=len(cluster.members),
        fits=case.workspace.launches,
        vetoes=vetoes(learned, case.workload),
    )
    found = planner.candidates(case.workload, supply, case.model)
    setups = [one for one in found if one.cluster.name == cluster.name]
    if not setups:
        return None
    frame = pd.DataFrame([setup.row() for setup in setups])
    step_s = case.model.predict(frame)["step_s"].to_numpy(float)
    best = int((step_s / [setup.global_batch for setup in setups]).argmin())
    return training_run(setups[best], float(step_s[best]), costs)


def _pilots(case: Case, count: int, costs: Costs) -> list[PlannedLaunch]:
    """Return at most `count` runs, goals with a constraint first; one launch for the same
    machines.
    """
    name, workspace = case.workload.name, case.workspace
    try:
        measured = reads.measured_setups(workspace.warehouse, workspace.provider.name, [name])
    except WarehouseMissing:
        measured = pd.DataFrame()
    goals = case.workload.goals or (Goal(goal="cheapest"),)
    runs: dict[PlannedRun, tuple[Cluster, PlannedRun]] = {}
    for goal in sorted(goals, key=lambda one: one.constraint is None):
        part = replace(case, workload=replace(case.workload, goals=(goal,)))
        found = pilots_for(part, plan_one(part, measured), buyable=case.offers, count=count)
        limit = "" if goal.limit is None else f" {goal.limit:g} {goal.constraint}"
        if not found["runs"]:
            open_why = found["reason"] or "no few runs would settle it"
            why = "its choice is settled" if found["settled"] else open_why
            reporter().say(f"{name}, {goal.goal}{limit}: {why}")
        for row in found["runs"]:
            cluster, run = row["planned"]
            run = replace(run, reason=f"a pilot of {goal.goal}{limit}")
            runs.setdefault(_bare(run), (cluster, run))
    launches: dict[tuple[str, str], tuple[Cluster, list[PlannedRun]]] = {}
    for cluster, run in list(runs.values())[:count]:
        launches.setdefault((cluster.name, cluster.market), (cluster, []))[1].append(run)
    return [launch_of(cluster, picked, costs) for cluster, picked in launches.values()]


def _cheapest(names: Sequence[str], offers: Sequence[Offer]) -> Cluster | None:
    """Return these machines in one market and zone at the least price; None if not sold
    together.
    """
    able = []
    for group in sold_together([offer for offer in offers if offer.usd_per_hour is not None]):
        by_name = {offer.instance_type.name: offer for offer in group}
        if by_name.keys() >= set(names):
            able.append(Cluster(members=tuple(by_name[name] for name in names)))
    return min(able, key=lambda one: sum(map(price_or_inf, one.members)), default=None)


def _known(case: Case) -> set[str]:
    return {offer.instance_type.name for offer in case.known}


def _bare(run: PlannedRun) -> PlannedRun:
    """Return the run without its place and reason: the same run of two launches is equal."""
    return replace(run, nodes=(), reason="")


def _predicted(case: Case, launches: Sequence[PlannedLaunch]) -> dict[PlannedRun, Row]:
    """Return predictions of the training runs that the model knows."""
    known, modes = _known(case), case.workload.modes
    items = [run for launch in launches for run in launch.items if run.kind == "train"]
    runs = [run for run in items if known.issuperset(run.members) and run.mode in modes]
    if case.model is None or not runs:
        return {}
    frame = case.model.predict(pd.DataFrame([run.row() for run in runs]))[[*_STEP]].astype(float)
    return dict(zip(map(_bare, runs), rows_of(frame), strict=True))
