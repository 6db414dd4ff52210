"""Choose the launches of a campaign, and carry them out.

A campaign is all launches of one refresh.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice

import pandas as pd

from models.campaign.candidates import Model
from models.campaign.run_value import Past
from models.campaign.shopping_list import (
    STOPS,
    CampaignLimits,
    PlannedLaunch,
    elastic_launch,
    learning_launches,
    shopping_list,
)
from models.domain.cluster import Cluster, Offer
from models.domain.setup_table import rows_of
from models.domain.workload import Workload, label
from models.planner import planner
from models.planner.learning import MOST_TRIES, unknown_learning
from models.step_time.dataset import valid_runs
from models.step_time.model import StepTimeModel, with_compressed
from warehouse import reads

from ..execution.collect import collect
from ..execution.data_transfer import DataCarrier
from ..execution.job import Served, job_of, workload_names
from ..execution.session import not_served, serve
from ..market.job_conditions import experience_of
from ..market.offers import current_offers, with_facts
from ..monitoring.checks import drifting_types
from ..node.data_paths import Download
from ..node.record import DATA, INSTALL, MACHINE
from ..recommendation.case import SEED, comparable, contenders, supply_of, with_usual_goals
from ..reporting.progress import reporter
from ..training.registry import Champion, load_champion
from ..workspace.environments import not_installable
from ..workspace.workspace import Workspace
from .spending import Tally, allowance, patience_s

# A campaign plans at most this number of lists of launches. With a champion (the model in use), a
# list counts only if it led to no new record.
MOST_LISTS = 4


def shop(
    workspace: Workspace,
    offers: Sequence[Offer],
    frames: Mapping[str, pd.DataFrame],
    champion: Champion | None,
    tally: Tally,
) -> list[PlannedLaunch]:
    """Return the launches to buy, in the order in which to buy them.

    The launches fit within the money and time that `tally` has left. Clusters in `tally.refused`
    and workloads in `tally.lacking` are left out.

    frames: the training data of the model, from `reads.training_frames`.
    champion: the model in use, or None.
    """
    workspace = workspace.without(tally.lacking)
    workloads = [with_facts(workload, frames["workloads"]) for workload in workspace.measurable]
    limits = _limits(workspace, tally)
    unknown = unknown_learning(workspace.mart("learning"), workloads)
    learning = learning_launches(limits, unknown, offers)
    past = Past(
        runs=frames["runs"],
        profiles=frames["profiles"],
        probes=frames["probes"],
        failures=_failures(workspace),
        drifting=drifting_types(workspace),
        stale_before=datetime.now(UTC) - timedelta(workspace.settings.campaign.stale_after_days),
    )
    model = None
    if champion is not None:
        model = _model(workspace, champion.model, workloads, offers, past.runs)
    rest = limits.after(*learning)
    launches = [*learning, *shopping_list(rest, workloads, offers, past, model=model)]
    if champion is not None and tally.left_usd > 0 and not launches and not tally.refused:
        reporter().say(STOPS)
    return launches


def _limits(workspace: Workspace, tally: Tally) -> CampaignLimits:
    campaign, launches = workspace.settings.campaign, workspace.provider.launches
    return CampaignLimits(
        max_usd=tally.left_usd,
        max_seconds=tally.left_s,
        max_hosts=campaign.max_hosts,
        fits=lambda cluster: launches(cluster) or just_refused(cluster, tally.refused),
        market=campaign.market,
        costs=experience_of(workspace).costs,
    )


def within(
    workspace: Workspace, champion: Champion | None, tally: Tally
) -> Iterator[PlannedLaunch]:
    """Yield the launches of a campaign, within the money and time that `tally` has left.

    With a model in use (`champion`), the function plans again after each launch, because the
    results may change the plan. Without a model, it plans several launches at once.

    On local hosts, if [campaign] elastic_runs is set, the last launches measure how much longer
    training takes when a machine is lost.
    """
    lists = 0
    while lists < MOST_LISTS:
        frames = reads.training_frames(workspace.warehouse, workspace.provider.name)
        launches = shop(workspace, current_offers(workspace), frames, champion, tally)
        before, launch_count = tally.runs, 0
        for launch in affordable(workspace, launches, tally):
            yield launch
            launch_count += 1
            if champion is not None:
                break
        lists += champion is None or tally.runs == before
        if not launches and tally.refused:
            # no other launch is left: try the refused clusters again
            tally.refused.clear()
        elif not launch_count:
            break
    if workspace.settings.campaign.elastic_runs and not workspace.spends_money:
        yield from affordable(workspace, list(_elastic(workspace, tally)), tally)


def affordable(
    workspace: Workspace, launches: Sequence[PlannedLaunch], tally: Tally
) -> Iterator[PlannedLaunch]:
    """Yield the launches that can be made now, and print why the other launches are left out.

    A launch is left out in these cases:

    - `allowance` refuses the launch, for example because it exceeds a cap.
    - The provider just refused the launch's cluster.
    - A workload of the launch cannot be measured.
    """
    offers = current_offers(workspace)
    reporter().start(tally.runs + sum(len(launch.items) for launch in launches))
    try:
        for launch in launches:
            problems = filter(None, map(tally.lacking.get, workload_names(launch)))
            why = next(problems, "") or just_refused(launch.cluster, tally.refused)
            why = why or allowance(workspace, launch, tally, datetime.now(UTC), offers).refusal
            if why:
                event = f"{launch.cluster.name} was not launched"
                note = f"{event if tally.left_s else 'no further launch was made'}: {why}"
                if note not in tally.notes:
                    tally.notes.append(note)
                    reporter().say(note)
            else:
                yield launch
    finally:
        reporter().stop()


def _elastic(workspace: Workspace, tally: Tally) -> Iterator[PlannedLaunch]:
    """Yield launches that measure how much longer training takes when a machine is lost.

    Each workload that lacks this measurement gets at most one launch, on a recommended cluster.
    Workloads with MOST_TRIES unsuccessful measurements are left out. The launches need local hosts,
    because the machines must share a folder of checkpoints.
    """
    runs = workspace.mart("elastic_runs")
    tries = runs.groupby(["workload", "workload_digest"])["status"].agg(list).to_dict()
    offers = current_offers(workspace)
    for workload in workspace.without(tally.lacking).measurable:
        statuses = tries.get((workload.name, workload.digest), [])
        if "measured" in statuses or len(statuses) >= MOST_TRIES:
            continue
        limits = _limits(workspace, tally)
        rows = rows_of(workspace.mart("recommendations", workload=workload.name))
        launches = (elastic_launch(limits, row, offers) for row in rows)
        yield from islice(filter(None, launches), 1)


def with_requirements_installed(workspace: Workspace) -> Workspace:
    """Return the workspace without workloads whose Python requirements cannot be installed here.

    The reasons are printed. On EC2, no workload is removed, because the machines install
    requirements themselves.
    """
    problems = {} if workspace.spends_money else not_installable(workspace.settings)
    for name, reason in problems.items():
        reporter().say(f"workload {name} is not measured: {reason}")
    return workspace.without(problems)


def just_refused(cluster: Cluster, clusters: Sequence[Cluster]) -> str:
    """Check if a request for `cluster` would fail again. Return the reason if so, else "".

    A request fails again if `cluster` contains all machines of a cluster in `clusters`. Zones are
    ignored, because a launch tries all zones of its region.

    clusters: the clusters that the provider just refused.
    """

    def counted(machines: Cluster) -> Counter[tuple[str, str, str]]:
        return Counter((o.instance_type.name, o.market, o.region) for o in machines.members)

    again = [other.name for other in clusters if counted(cluster) >= counted(other)]
    return f"{again[0]} was not available a moment ago" if again else ""


def _failures(workspace: Workspace) -> pd.DataFrame:
    """Return the failed runs that would probably fail again, as rows of the mart `failed_runs`.

    These runs are left out:

    - runs of workloads that were changed or removed after the run
    - runs that failed because of a machine, missing data or an installation
    - runs whose failure no machine reported
    """
    runs = workspace.mart("failed_runs", status="failed", told_by="node")
    digests = {workload.digest for workload in workspace.measurable}
    runs = runs[~runs["cause"].isin((MACHINE, DATA, INSTALL))]
    return runs[(runs["kind"] == "probe") | runs["workload_digest"].isin(digests)]


def _model(
    workspace: Workspace,
    model: StepTimeModel,
    workloads: Sequence[Workload],
    offers: Sequence[Offer],
    runs: pd.DataFrame,
) -> Model:
    """Return the parts of `model` that a campaign needs to estimate the value of a new run.

    The value of a run is the expected improvement of the recommendations. Workloads and instance
    types are left out if `model` cannot predict them, or if their definitions have changed since
    `model` was trained.

    model: the step time model in use.
    runs: all measured runs, including runs that are newer than `model`.
    """
    pairs = model.trained  # without the modes that with_compressed adds below
    for workload in workloads:
        model = with_compressed(model, workload)
    comparable_offers = comparable(model, offers)
    experience = experience_of(workspace)
    measured_workloads = [
        model.as_measured(workload) for workload in workloads if model.met_workload(workload)
    ]
    choice_set = {}
    for workload in map(with_usual_goals, measured_workloads if comparable_offers else ()):
        supply = supply_of(workspace, workload, comparable_offers, experience)
        plan = planner.plan(workload, supply, model, seed=SEED)
        choice_set[workload.name] = contenders(model, workload, plan, experience.conditions)
    return Model(
        choice_set=choice_set,
        joint=model.joint,
        workloads=pairs
        & {(workload.name, mode) for workload in measured_workloads for mode in workload.modes},
        types=frozenset(offer.instance_type.name for offer in comparable_offers),
        fresh=valid_runs(runs[~runs["run_id"].isin(model.trained_on)]),
        predict=model.predict,
    )


def torch_mismatch(workspace: Workspace) -> str:
    """Return a warning if stored runs and the EC2 image have different torch versions, else "".

    The first run on the image makes the model ignore all stored runs with other torch versions.
    Runs on local hosts need no warning, because they cost nothing to repeat.
    """
    line = workspace.settings.ec2.torch_line
    if not workspace.spends_money or not line:
        return ""
    torch_lines = workspace.mart("torch_lines")
    others = torch_lines[torch_lines["torch_line"] != line]
    if others.empty:
        return ""
    return (
        f"warning: the image of [ec2] ami_parameter has torch {line}. Its first run makes Srift"
        f" ignore {others['runs'].sum():.0f} runs with torch {', '.join(others['torch_line'])}; to"
        " keep these runs, name an image with their torch version"
    )


def list_of(workspace: Workspace, offers: Sequence[Offer], tally: Tally) -> list[PlannedLaunch]:
    """Return the launches that a refresh would make now; print a note if nothing is for sale."""
    provider, market = workspace.provider.name, workspace.settings.campaign.market
    frames = reads.training_frames(workspace.warehouse, provider)
    champion = load_champion(workspace.home, provider)
    if not any(offer.market == market and offer.usd_per_hour is not None for offer in offers):
        reporter().say(
            f"no instance type has a {market} price, so nothing can be measured: see `srift"
            " offers`, or set `market` under [campaign] in srift.toml"
        )
    return shop(workspace, offers, _of_today(frames, workspace.measurable), champion, tally)


def _of_today(
    frames: Mapping[str, pd.DataFrame], workloads: Sequence[Workload]
) -> Mapping[str, pd.DataFrame]:
    """Return `frames` without the runs and profiles of workloads that have changed.

    A workload has changed if its digest in `workloads` differs from its digest in
    `frames["workloads"]`.

    frames: the training data of the model, from `reads.training_frames`.
    workloads: the definitions in srift.toml.
    """
    digests = frames["workloads"].set_index("workload")["digest"].to_dict()
    changed = [
        workload.name for workload in workloads if digests.get(workload.name) != workload.digest
    ]
    current_frames = {
        name: frames[name][~frames[name]["workload"].isin(changed)] for name in ("runs", "profiles")
    }
    return {**frames, **current_frames}


def serve_launch(
    workspace: Workspace, launch: PlannedLaunch, lease_id: str, tally: Tally
) -> Served:
    """Acquire one cluster, measure the runs of `launch` on it, and release it.

    No machine is acquired if `allowance` refuses the launch, or if the data of all its runs are
    missing. Each workload without its data is added to `tally.lacking`.

    Machines write their records to the mailbox (a folder or S3 prefix). After this function
    returns, the caller must load the records into the warehouse. If the function ends with an
    exception or Ctrl-C, it loads the records itself.
    """
    carrier = DataCarrier(workspace)
    plans = carrier.plans(workload_names(launch), launch.cluster.region)
    tally.data |= {plan.name: plan for plan in plans}
    tally.bucket_region = carrier.bucket_region
    limits = allowance(workspace, launch, tally, datetime.now(UTC))
    job = job_of(
        launch,
        workspace.settings,
        lease_id=lease_id,
        deadline_s=limits.deadline_s,
        data={plan.name: Download(plan.place, *plan.limits) for plan in plans},
    )
    if limits.refusal:
        return not_served(Served(lease_id=lease_id), job, "refused", limits.refusal)
    tally.usd += sum(plan.upload_usd for plan in plans)
    plans = [carrier.carry(plan, tally.refresh_id) for plan in plans]
    tally.data |= {plan.name: plan for plan in plans}
    problems = {plan.name: plan.problem for plan in plans if plan.problem}
    tally.lacking |= problems
    for name, why in problems.items():
        reporter().say(f"{name} is not measured: {why}")
    items = tuple(item for item in job.items if item.workload not in problems)
    if problems and not items:
        return Served(lease_id=lease_id, outcome="failed: no data")
    job = replace(
        job,
        items=items,
        files=[(spec, source) for spec, source in job.files if spec.name not in problems],
        max_usd_per_hour=limits.max_usd_per_hour,
        patience_s=patience_s(workspace, launch, tally, limits.deadline_s),
        download_usd=sum(plan.download_usd for plan in plans),
    )
    runs = dict(zip(job.run_setups, launch.items, strict=True))

    def watch(run_id: str, run_count: int, usd: float | None) -> None:
        run = runs[run_id]
        line = f"{launch.cluster.name}: {run.kind} {label(*run.trained)} on {len(run.nodes)} hosts"
        reporter().watch(line, tally.runs + run_count, None if usd is None else tally.usd + usd)

    try:
        return serve(workspace.provider, job, stop_at=tally.stop_of(launch), watch=watch)
    except BaseException:
        # The first error must reach the user. `srift reap` loads the remaining records.
        with suppress(Exception):
            collect(workspace, datetime.now(UTC))
        raise
