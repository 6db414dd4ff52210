"""What `srift measure` buys: clusters that a person names, or pilots of a workload's goals, as launches of a campaign.

The caps, the leases, the checks and the loading are those of a campaign (`campaign.py`, `budget.py`).
"""

from __future__ import annotations

from collections import Counter
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
from models.domain.setup_table import rows_of
from models.domain.suggestions import nearest_names
from models.domain.workload import Goal, Mode, Setup, joined
from models.planner import planner
from models.planner.candidates import Supply
from models.planner.enumeration import price_or_inf, sold_together
from models.planner.learning import vetoes
from warehouse import reads
from warehouse.database import WarehouseMissing

from ..execution.job import Served, workload_names
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
from .budget import Tally, allowance
from .campaign import just_refused, outdating

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A workload, and the clusters to measure it on, as 2xNAME+1xOTHER; without any, at most `pilots` pilots."""

    workload: str
    clusters: tuple[str, ...] = ()
    pilots: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wished:
    """Launches to make, and by cluster and run what the model in force predicts of it: `step_s` with its interval."""

    launches: Sequence[PlannedLaunch]
    predicted: Mapping[PlannedRun, Row]


def clusters_of(workspace: Workspace, wish: Wish, offers: Sequence[Offer]) -> list[Cluster]:
    """The clusters that are named, each at its least price in the campaign's market, where that has none in the other.

    Raises SettingsError, with the nearest right name, on a workload that cannot be run here, a text that names no
    machines, a type without a price, and a cluster that this installation would not launch.
    """
    able = {one.name for one in workspace.measurable}
    if wish.workload not in able:
        if wish.workload in workspace.settings.workloads:
            raise SettingsError(
                f"{wish.workload} has no entrypoint in srift.toml, so that it cannot be run: state one under"
                f" [workloads.{wish.workload}], or `srift import` measurements of it"
            )
        raise SettingsError(
            f"unknown workload {wish.workload!r}; {nearest_names(wish.workload, able)}"
        )
    sold = for_sale(workspace, offers)
    named = (_cluster(workspace, text, offers, sold) for text in wish.clusters)
    return list({one.name: one for one in named}.values())  # 2xa and 1xa+1xa are one


def launches_for(
    workspace: Workspace, champion: Champion | None, wish: Wish, offers: Sequence[Offer]
) -> Wished:
    """What `wish` asks for. Raises SettingsError as `clusters_of`; says why where a goal has no pilots."""
    clusters = clusters_of(workspace, wish, offers)
    workload = workspace.settings.workload(wish.workload)
    costs = costs_of(workspace)
    with one_thread():
        case = Case.of(workspace, champion, workload, offers)
        if clusters:
            launches = [
                launch_of(cluster, _runs_on(case, cluster, costs), costs) for cluster in clusters
            ]
        else:
            launches = _pilots(case, wish.pilots, costs)
        return Wished(launches=launches, predicted=_predicted(case, launches))


def dry_run(provider: str, wish: Wish) -> list[PlannedLaunch]:
    """What would be bought now. Starts nothing and writes nothing; works before the first refresh too."""
    workspace = open_workspace(provider)
    offers = offers_now(workspace, datetime.now(UTC))
    return list(
        launches_for(workspace, load_champion(workspace.home, provider), wish, offers).launches
    )


def affordable(workspace: Workspace, wished: Wished, tally: Tally) -> Iterator[PlannedLaunch]:
    """Launches that every cap still pays for, in order; of each other it is said, and noted in `tally`, why not."""
    offers, warning = current_offers(workspace), outdating(workspace)
    reporter().start(sum(len(launch.items) for launch in wished.launches))
    for launch in wished.launches:
        why = just_refused(launch.cluster, tally.refused) or _unpaid(launch, tally)
        why = why or allowance(workspace, launch, tally, datetime.now(UTC), offers).refusal
        why = why or next(
            (tally.lacking[name] for name in workload_names(launch) if name in tally.lacking), ""
        )
        if why:
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
    """A row a run of the launches that were `made`: what was predicted and measured of its step, or why nothing was."""
    provider = workspace.provider.name
    measured = {
        planned_id(str(row["run_id"])): row
        for row in rows_of(_mart(workspace, "runs", provider, source="srift"))
    }
    failed = {
        planned_id(str(row["run_id"])): str(row["reason"])
        for row in rows_of(_mart(workspace, "failed_runs", provider))
    }
    unknown = dict.fromkeys(("step_s", "step_low_s", "step_high_s"))
    rows = []
    for launch, served in made:
        done = {planned_id(one) for one in served.recorded}
        for number, item in enumerate(launch.items):
            run_id = f"{served.lease_id}-{number:03d}"
            found, train, (name, mode) = measured.get(run_id), item.kind == "train", item.trained
            reason = "" if found else failed.get(run_id, "" if run_id in done else served.outcome)
            if train and not found and not reason:
                reason = (
                    "it is stored, and not of the workload or the machines as they are defined now"
                )
            predicted = unknown | wished.predicted.get(_bare(item), {})
            rows.append(
                {
                    "run_id": run_id,
                    "kind": item.kind,
                    "workload": name,
                    **mode._asdict(),
                    "cluster": item.cluster,
                    "market": launch.cluster.members[0].market,
                    "layout": joined(item.layout),
                    "batch_per_device": joined(item.batches)
                    if train
                    else ", ".join(map(str, item.batches)),
                    "accumulation_steps": item.accumulation_steps,
                    **{f"predicted_{column}": value for column, value in predicted.items()},
                    "step_s": None if found is None else float(found["step_s"]),
                    "measured": bool(found) or (run_id in done and not reason),
                    "reason": reason,
                }
            )
    return rows


def _mart(workspace: Workspace, name: str, provider: str, **equal: str) -> pd.DataFrame:
    try:
        return reads.mart(workspace.warehouse, name, provider=provider, **equal)
    except WarehouseMissing:
        return pd.DataFrame()


def _unpaid(launch: PlannedLaunch, tally: Tally) -> str:
    if tally.affords(launch):
        return ""
    if tally.left_s <= 0:
        return "the minutes of this campaign are over ([campaign] max_minutes, [ec2] max_minutes)"
    return f"it is expected to cost ${launch.est_usd:.4f}, and ${tally.left_usd:.4f} is left under the cap"


def _cluster(
    workspace: Workspace, text: str, offers: Sequence[Offer], sold: Sequence[Offer]
) -> Cluster:
    known = {one.instance_type.name for one in offers}
    try:
        names = parse_cluster(text)
    except ValueError as error:
        meant = f"; did you mean 1x{text}?" if text in known else ""
        raise SettingsError(f"--on {text}: {error}{meant}") from None
    for name in names:
        if name not in known:
            raise SettingsError(
                f"--on {text}: no instance type {name!r} is on offer; {nearest_names(name, known)}"
            )
    cluster = _cheapest(names, sold) or _cheapest(names, offers)
    if cluster is None:
        raise SettingsError(
            f"--on {text}: nobody sells all of it in one zone and market at a price that is known"
        )
    why = _not_launched(workspace, cluster)
    if why:
        smaller = (
            Cluster(members=cluster.members[:count]) for count in range(len(names) - 1, 0, -1)
        )
        fits = next((one.name for one in smaller if not _not_launched(workspace, one)), None)
        raise SettingsError(
            f"--on {text}: {why.rstrip('.')}"
            + ("" if fits is None else f"; the most of it that can be is {fits}")
        )
    return cluster


def _not_launched(workspace: Workspace, cluster: Cluster) -> str:
    most = workspace.settings.campaign.max_hosts
    if len(cluster.members) > most:
        return f"a campaign launches at most {most} machines ([campaign] max_hosts)"
    return workspace.launches(cluster)


def _runs_on(case: Case, cluster: Cluster, costs: Costs) -> list[PlannedRun]:
    """A profile on each type that has none, and a training run: of the split and mode that the model expects to be the
    quickest by the sample, or, where it knows too little, of the first mode on all devices at the least global batch.

    Raises SettingsError where the cluster cannot train the workload at all.
    """
    reason = "named by hand"
    setup = _quickest(case, cluster)
    if setup is not None:
        predicted = (
            case.model.predict(pd.DataFrame([setup.row()]))
            if case.model is not None
            else pd.DataFrame()
        )
        run = training_run(setup, float(predicted["step_s"].iloc[0]), costs)
    else:
        first = replace(case.workload, modes=case.workload.modes[:1])
        found = training_runs([first], [cluster], pd.DataFrame(), expected_step=None, costs=costs)
        whole = tuple(one.instance_type.devices for one in cluster.members)
        exact = [one for one in found.values() if one.exact and one.layout == whole]
        if not exact:
            raise SettingsError(
                f"{cluster.name} cannot train {first.name}: its global batch of {first.global_batch_least} samples is"
                f" not to be shared among {sum(whole)} devices, or they do not compute in its precision"
            )
        run = min(exact, key=lambda one: one.accumulation_steps)
    return [*_profiles(case, run, cluster, costs, reason), replace(run, reason=reason)]


def _quickest(case: Case, cluster: Cluster) -> Setup | None:
    """None where the model does not know the workload or a type as they are defined now."""
    if case.model is None or not {one.instance_type.name for one in cluster.members} <= _known(
        case
    ):
        return None
    learned = reads.learning(case.workspace.warehouse, case.workspace.provider.name)
    supply = Supply(
        offers=list({one.instance_type.name: one for one in cluster.members}.values()),
        max_hosts=len(cluster.members),
        fits=case.workspace.launches,
        vetoes=vetoes(learned, case.workload),
    )
    types = Counter(one.instance_type.name for one in cluster.members)
    setups = [
        one
        for one in planner.candidates(case.workload, supply, case.model)
        if Counter(member.instance_type.name for member in one.cluster.members) == types
    ]
    if not setups:
        return None
    step_s = case.model.predict(pd.DataFrame([one.row() for one in setups]))["step_s"].to_numpy(
        float
    )
    return setups[int((step_s / [one.global_batch for one in setups]).argmin())]


def _profiles(
    case: Case, run: PlannedRun, cluster: Cluster, costs: Costs, reason: str
) -> list[PlannedRun]:
    alone = replace(case.workload, modes=(run.mode.alone,))
    try:
        frames = reads.training_frames(case.workspace.warehouse, case.workspace.provider.name)
    except WarehouseMissing:
        frames = {one: pd.DataFrame() for one in reads.TRAINING_FRAMES}
    lines = profiled_lines(frames["profiles"])
    types = {one.instance_type.name: one.instance_type for one in cluster.members}
    return [
        replace(profile_of(alone, kind, costs), reason=reason)
        for type_name, kind in types.items()
        if (alone.name, run.mode.alone, type_name) not in lines
    ]


def _pilots(case: Case, count: int, costs: Costs) -> list[PlannedLaunch]:
    """At most `count` runs, those of goals with a constraint first; runs on the same machines are one launch."""
    name, measured = case.workload.name, _measured(case.workspace, case.workload.name)
    runs: dict[PlannedRun, tuple[PlannedRun, str, str]] = {}
    for goal in sorted(
        case.workload.goals or (Goal(goal="cheapest"),), key=lambda one: one.constraint is None
    ):
        asked = replace(case, workload=replace(case.workload, goals=(goal,)))
        found = pilots_for(asked, plan_one(asked, measured), buyable=case.offers, count=count)
        limit = "" if goal.limit is None else f" {goal.limit:g} {goal.constraint}"
        if not found["runs"]:
            said = (
                "its choice is settled"
                if found["settled"]
                else found["reason"] or "no few runs would settle it"
            )
            reporter().say(f"{name}, {goal.goal}{limit}: {said}")
        for row in found["runs"]:
            item = _item(row, name, costs, f"a pilot of {goal.goal}{limit}")
            runs.setdefault(_bare(item), (item, str(row["cluster"]), str(row["market"])))
    by_place: dict[tuple[str, str], list[PlannedRun]] = {}
    for item, cluster, market in list(runs.values())[:count]:
        by_place.setdefault((cluster, market), []).append(item)
    launches = []
    for (names, market), items in by_place.items():
        cheapest = _cheapest(
            parse_cluster(names), [one for one in case.offers if one.market == market]
        )
        if cheapest is not None:  # they were priced just now
            launches.append(launch_of(cheapest, items, costs))
    return launches


def _cheapest(names: Sequence[str], offers: Sequence[Offer]) -> Cluster | None:
    """These machines in one market and zone, at the least price that is known; None where nobody sells all of them."""
    priced = [one for one in offers if one.usd_per_hour is not None]
    groups = [{one.instance_type.name: one for one in group} for group in sold_together(priced)]
    able = [
        Cluster(members=tuple(group[name] for name in names))
        for group in groups
        if set(names) <= set(group)
    ]
    return min(able, key=lambda one: sum(map(price_or_inf, one.members)), default=None)


def _measured(workspace: Workspace, name: str) -> pd.DataFrame:
    try:
        return reads.measured_setups(workspace.warehouse, workspace.provider.name, name)
    except WarehouseMissing:
        return pd.DataFrame()


def _item(row: Mapping[str, Any], workload: str, costs: Costs, reason: str) -> PlannedRun:
    """A pilot's row as the run that it names."""
    members = parse_cluster(str(row["cluster"]))
    mode = Mode(*(str(row[name]) for name in Mode._fields))
    devices = parse_numbers(str(row["layout"]), len(members), "layout")
    text = str(row["batch_per_device"])
    train = row["kind"] == "train"
    batches = (
        parse_numbers(text, len(members), "batch_per_device")
        if train
        else tuple(map(int, text.split(", ")))
    )
    steps = int(row["accumulation_steps"])
    return PlannedRun(
        kind=str(row["kind"]),
        workload=workload,
        mode=mode,
        members=members,
        batches=batches,
        accumulation_steps=steps,
        global_batch=steps * sum(a * b for a, b in zip(devices, batches, strict=True))
        if train
        else 0,
        devices=devices if max(devices) > 1 else (),
        est_s=max(float(row["seconds"]) - costs.launch_s, 0.0),
        reason=reason,
    )


def _known(case: Case) -> set[str]:
    return {one.instance_type.name for one in case.known}


def _bare(item: PlannedRun) -> PlannedRun:
    """Without what tells where and why it is bought: the same run of two launches is equal."""
    return replace(item, nodes=(), reason="")


def _predicted(case: Case, launches: Sequence[PlannedLaunch]) -> dict[PlannedRun, Row]:
    """By run, for those that the model knows enough of."""
    items = {
        _bare(item): None for launch in launches for item in launch.items if item.kind == "train"
    }
    able = [one for one in items if case.model is not None and set(one.members) <= _known(case)]
    able = [one for one in able if one.trained[1] in case.workload.modes]
    if not able or case.model is None:
        return {}
    frame = case.model.predict(pd.DataFrame([one.row() for one in able]))
    columns = ["step_s", "step_low_s", "step_high_s"]
    return {
        item: {str(k): float(v) for k, v in row.items()}
        for item, row in zip(able, rows_of(frame[columns]), strict=True)
    }
