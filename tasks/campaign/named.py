"""What `srift measure` buys: named clusters, or pilots of a workload's goals, as planned launches.

The caps, the leases, the checks and the loading are those of a campaign.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
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
from models.domain.cluster import Cluster, Offer, parse_cluster, parse_numbers
from models.domain.setup_table import mode_of, rows_of
from models.domain.suggestions import nearest_names
from models.domain.workload import Goal, Setup, joined
from models.planner import planner
from models.planner.candidates import Supply
from models.planner.enumeration import price_or_inf, sold_together
from models.planner.learning import vetoes
from warehouse import reads
from warehouse.database import WarehouseMissing

from ..execution.job import Served
from ..execution.outcomes import planned_id
from ..market.job_conditions import costs_of
from ..market.offers import current_offers, offers_now
from ..recommendation.pilots import for_sale, pilots_for
from ..recommendation.recommend import Case, plan_one
from ..reporting.progress import reporter
from ..training.registry import Champion, load_champion
from ..workspace.blas_threads import one_thread
from ..workspace.settings import SettingsError
from ..workspace.workspace import Workspace, open_workspace
from .budget import Tally
from .campaign import obstacle, outdating

Row = dict[str, Any]
_STEP = ("step_s", "step_low_s", "step_high_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A workload, and clusters such as 2xNAME+1xOTHER to measure it on; or at most `pilots`
    pilots.
    """

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


def dry_run(provider: str, wish: Wish) -> list[PlannedLaunch]:
    """Return what would be bought now; starts and writes nothing."""
    workspace = open_workspace(provider)
    offers = offers_now(workspace, datetime.now(UTC))
    champion = load_champion(workspace.home, provider)
    return list(launches_for(workspace, champion, wish, offers).launches)


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
            step_s = measured.get(run_id)
            reason = ""
            if step_s is None:
                reason = failed.get(run_id, "" if run_id in recorded else served.outcome)
                if run.kind == "train" and not reason:
                    reason = "stored under a definition of the workload or machines that changed"
            predicted = wished.predicted.get(_bare(run), dict.fromkeys(_STEP))
            rows.append(
                {
                    "run_id": run_id,
                    "kind": run.kind,
                    "workload": run.workload,
                    **run.mode._asdict(),
                    "cluster": run.cluster,
                    "market": launch.cluster.members[0].market,
                    "layout": joined(run.layout),
                    "batch_per_device": joined(run.batches)
                    if run.kind == "train"
                    else ", ".join(map(str, run.batches)),
                    "accumulation_steps": run.accumulation_steps,
                    **{f"predicted_{column}": value for column, value in predicted.items()},
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
    runs = [*_profiles(case, run, cluster, costs), run]
    return [replace(one, reason="named by hand") for one in runs]


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
    setups = [setup for setup in found if _types(setup.cluster) == _types(cluster)]
    if not setups:
        return None
    step_s = case.model.predict(pd.DataFrame([setup.row() for setup in setups]))["step_s"]

    def sample_s(pair: tuple[Setup, float]) -> float:
        return pair[1] / pair[0].global_batch

    setup, seconds = min(zip(setups, step_s.astype(float), strict=True), key=sample_s)
    return training_run(setup, seconds, costs)


def _types(cluster: Cluster) -> list[str]:
    return sorted(offer.instance_type.name for offer in cluster.members)


def _profiles(case: Case, run: PlannedRun, cluster: Cluster, costs: Costs) -> list[PlannedRun]:
    alone = replace(case.workload, modes=(run.mode.alone,))
    profiles = _mart(case.workspace, "profiles", provider=case.workspace.provider.name)
    lines = profiled_lines(profiles)
    types = {offer.instance_type.name: offer.instance_type for offer in cluster.members}
    return [
        profile_of(alone, instance_type, costs)
        for name, instance_type in types.items()
        if (alone.name, run.mode.alone, name) not in lines
    ]


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
    runs: dict[PlannedRun, tuple[PlannedRun, str, str]] = {}
    for goal in sorted(goals, key=lambda one: one.constraint is None):
        part = replace(case, workload=replace(case.workload, goals=(goal,)))
        found = pilots_for(part, plan_one(part, measured), buyable=case.offers, count=count)
        limit = "" if goal.limit is None else f" {goal.limit:g} {goal.constraint}"
        if not found["runs"]:
            open_why = found["reason"] or "no few runs would settle it"
            why = "its choice is settled" if found["settled"] else open_why
            reporter().say(f"{name}, {goal.goal}{limit}: {why}")
        for row in found["runs"]:
            run = _run_of(row, name, costs, f"a pilot of {goal.goal}{limit}")
            runs.setdefault(_bare(run), (run, str(row["cluster"]), str(row["market"])))
    by_place: dict[tuple[str, str], list[PlannedRun]] = defaultdict(list)
    for run, cluster, market in list(runs.values())[:count]:
        by_place[cluster, market].append(run)
    launches = []
    for (cluster, market), picked in by_place.items():
        sold = [offer for offer in case.offers if offer.market == market]
        cheapest = _cheapest(parse_cluster(cluster), sold)
        if cheapest is not None:
            launches.append(launch_of(cheapest, picked, costs))
    return launches


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


def _run_of(row: Mapping[str, Any], workload: str, costs: Costs, reason: str) -> PlannedRun:
    """Return the run that a pilot's row names."""
    members = parse_cluster(str(row["cluster"]))
    devices = parse_numbers(str(row["layout"]), len(members), "layout")
    text, steps = str(row["batch_per_device"]), int(row["accumulation_steps"])
    if row["kind"] == "train":
        batches = parse_numbers(text, len(members), "batch_per_device")
        pairs = zip(devices, batches, strict=True)
        global_batch = steps * sum(count * share for count, share in pairs)
    else:
        batches, global_batch = tuple(map(int, text.split(", "))), 0
    return PlannedRun(
        kind=str(row["kind"]),
        workload=workload,
        mode=mode_of(row),
        members=members,
        batches=batches,
        accumulation_steps=steps,
        global_batch=global_batch,
        devices=devices if max(devices) > 1 else (),
        est_s=max(float(row["seconds"]) - costs.launch_s, 0.0),
        reason=reason,
    )


def _known(case: Case) -> set[str]:
    return {offer.instance_type.name for offer in case.known}


def _bare(run: PlannedRun) -> PlannedRun:
    """Return the run without its place and reason: the same run of two launches is equal."""
    return replace(run, nodes=(), reason="")


def _predicted(case: Case, launches: Sequence[PlannedLaunch]) -> dict[PlannedRun, Row]:
    """Return predictions of the training runs that the model knows."""
    model, known = case.model, _known(case)
    runs = {
        _bare(run): None
        for launch in launches
        for run in launch.items
        if run.kind == "train" and known.issuperset(run.members) and run.mode in case.workload.modes
    }
    if model is None or not runs:
        return {}
    frame = model.predict(pd.DataFrame([run.row() for run in runs]))[[*_STEP]].astype(float)
    return dict(zip(runs, rows_of(frame), strict=True))
