"""The next launch: a shopping list from the past, the offers and the caps, and each launch of it served under them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd

from models.campaign import campaign as pure
from models.campaign.campaign import STOPS, PlannedLaunch, shopping_list
from models.campaign.candidates import PlannedRun, Trained
from models.campaign.run_value import Model, Past
from models.campaign.value_of_information import ChoiceSet
from models.domain.cluster import Cluster, InstanceType, Offer, parse_cluster
from models.domain.setup_table import modes_of, rows_of
from models.domain.workload import Workload
from models.planner.learning import MOST_TRIES, unknown_learning
from models.step_time.dataset import TrainingData, valid_runs
from models.step_time.model import StepTimeModel
from models.step_time.unmeasured import with_compressed
from warehouse import reads
from warehouse.database import WarehouseMissing

from ..execution.collect import collect
from ..execution.data import DataCarrier, fetch_s
from ..execution.job import Clock, Job, Served, Stopwatch, Watch, job_of, workload_names, write_rows
from ..execution.mailbox import WorkloadChanged
from ..execution.outcomes import AttemptEnd, full_mailbox, item_row, launch_row, planned_id
from ..execution.session import Session
from ..market.job_conditions import costs_of, job_conditions
from ..market.offers import current_offers, nothing_to_buy, offers_now, with_facts
from ..monitoring.checks import drifting_types
from ..node.record import DATA, INSTALL, MACHINE
from ..providers.base import NoCapacity, Provider, ProviderError
from ..recommendation.recommend import comparable, contending, planned
from ..reporting.progress import reporter
from ..training.registry import Champion, load_champion
from ..workspace.environments import not_installable
from ..workspace.workspace import Workspace, open_workspace
from .budget import Tally, allowance, patience_s

MOST_LISTS = (
    4  # of one campaign, with a champion those without a run: always refused, asking on is no use
)


def shop(
    workspace: Workspace,
    offers: Sequence[Offer],
    frames: Mapping[str, pd.DataFrame],
    champion: Champion | None,
    max_usd: float | None,
    max_seconds: float | None = None,
    refused: Sequence[Cluster] = (),
) -> list[PlannedLaunch]:
    """Launches to make within the caps of srift.toml, or within `max_usd` and `max_seconds` where they are given.

    No cluster that holds one of those just `refused`: another type may have the same device, or tell as much.
    """
    campaign = workspace.settings.campaign
    known_workloads = with_facts(workspace.measurable, frames["workloads"])
    read = TrainingData(
        **{name: frames.get(name, pd.DataFrame()) for name in reads.TRAINING_FRAMES}
    )
    bought = _bought(workspace, max_usd, max_seconds, refused)
    learned = reads.learning(workspace.warehouse, workspace.provider.name)
    learning = pure.learning_launches(bought, unknown_learning(learned, known_workloads), offers)
    others = shopping_list(
        bought.after(learning),
        known_workloads,
        offers,
        Past(
            runs=read.runs,
            profiles=read.profiles,
            probes=read.probes,
            failures=_failures(workspace),
            drifting=drifting_types(workspace),
            stale_before=datetime.now(UTC) - timedelta(days=campaign.stale_after_days),
        ),
        model=None
        if champion is None
        else _model(workspace, champion.model, known_workloads, offers, read.runs),
    )
    return [*learning, *others]


def _bought(
    workspace: Workspace,
    max_usd: float | None,
    max_seconds: float | None,
    refused: Sequence[Cluster],
) -> pure.CampaignLimits:
    """What launches may cost together, and on which clusters; as `shop` is asked."""
    campaign = workspace.settings.campaign
    return pure.CampaignLimits(
        max_usd=campaign.max_usd if max_usd is None else max_usd,
        max_seconds=workspace.max_minutes * 60.0 if max_seconds is None else max_seconds,
        max_hosts=campaign.max_hosts,
        fits=lambda cluster: workspace.launches(cluster) or just_refused(cluster, refused),
        seed=campaign.seed,
        market=campaign.market,
        costs=costs_of(workspace),
    )


def within(
    workspace: Workspace, champion: Champion | None, tally: Tally
) -> Iterator[PlannedLaunch]:
    """Launches within what `tally` has left, list after list, each made with what came home from the last.

    So a cluster that was taken away by the market or refused is not the end of what it was to measure: lists after it
    go by other types, which may have the same device, and come back to it where there is nothing else. With a champion
    every launch is chosen anew, since what the one before it measured says what is still to be measured.
    """
    lists, warning = 0, outdating(workspace)
    while lists < MOST_LISTS:
        frames = reads.training_frames(workspace.warehouse, workspace.provider.name)
        offers = current_offers(workspace)
        left = workspace.without(tally.lacking)
        launches = shop(left, offers, frames, champion, tally.left_usd, tally.left_s, tally.refused)
        reporter().start(tally.runs + sum(len(launch.items) for launch in launches))
        before, bought, refusal = tally.runs, False, ""
        for launch in launches:
            if not tally.affords(launch) or not tally.lacking.keys().isdisjoint(
                workload_names(launch)
            ):
                continue
            if just_refused(launch.cluster, tally.refused):  # since the list was made
                continue
            why = allowance(workspace, launch, tally, datetime.now(UTC), offers).refusal
            if why:  # a smaller one may still be paid for
                refusal = refusal or why
                continue
            if warning:
                reporter().say(warning)
                warning = ""
            yield launch
            bought = True
            if champion is not None:
                break
        if not launches and tally.refused:
            tally.refused.clear()
            lists += 1
            continue
        if not launches:
            _say_why(champion, tally.left_usd)
            break
        if refusal and not bought:
            reporter().say(f"not launched: {refusal}")
            break
        lists += champion is None or tally.runs == before  # a champion's lists end by themselves
    if workspace.settings.campaign.elastic_runs:
        yield from _elastic(workspace, tally)
    reporter().stop()


def _elastic(workspace: Workspace, tally: Tally) -> Iterator[PlannedLaunch]:
    """A run of each workload that has none yet, nor MOST_TRIES that failed, on the machines that the table recommends,
    which loses one of them.
    """
    if not workspace.simulated:
        reporter().say(
            f"no elastic run: machines of {workspace.provider.name} have no folder for checkpoints that all of them"
            " see yet, and none is taken away on purpose"
        )
        return
    runs = reads.mart(workspace.warehouse, "elastic_runs", provider=workspace.provider.name)
    told = {
        (one.workload, one.workload_digest) for one in runs.itertuples() if one.status == "measured"
    }
    tries = Counter(zip(runs["workload"], runs["workload_digest"], strict=True))
    told |= {key for key, many in tries.items() if many >= MOST_TRIES}
    offers = current_offers(workspace)
    rows = rows_of(
        reads.mart(workspace.warehouse, "recommendations", provider=workspace.provider.name)
    )
    for workload in workspace.without(tally.lacking).measurable:
        bought = _bought(workspace, tally.left_usd, tally.left_s, tally.refused)
        own = [
            row
            for row in rows
            if row["workload"] == workload.name and (workload.name, workload.digest) not in told
        ]
        found = (pure.elastic_launch(bought, row, offers) for row in own)
        launch = next((one for one in found if one is not None and tally.affords(one)), None)
        if launch is None or launch.est_s > tally.left_s:
            continue
        if why := allowance(workspace, launch, tally, datetime.now(UTC), offers).refusal:
            reporter().say(f"not launched: {why}")
            continue
        yield launch


def with_requirements_installed(workspace: Workspace) -> Workspace:
    """Without the workloads whose requirements cannot be installed, each said with the reason.

    Only where machines are parts of this one, whose Python is theirs too: others install on their own, once a launch.
    """
    refused = not_installable(workspace.settings) if workspace.simulated else {}
    for name, reason in refused.items():
        reporter().say(f"workload {name} is not measured: {reason}")
    able = {name: one for name, one in workspace.settings.workloads.items() if name not in refused}
    return replace(workspace, settings=workspace.settings.model_copy(update={"workloads": able}))


def just_refused(cluster: Cluster, refused: Sequence[Cluster]) -> str:
    """Why machines need not be asked for again in this campaign; empty where nothing like them was refused."""
    held = _counted(cluster)
    for one in refused:
        if all(held[what] >= count for what, count in _counted(one).items()):
            return f"{one.name} was not to be had, or not with its devices, a moment ago"
    return ""


def _counted(cluster: Cluster) -> Counter[tuple[str, str, str]]:
    """Machines by type, market and region: zones are tried in turn by whoever launches."""
    return Counter((one.instance_type.name, one.market, one.region) for one in cluster.members)


def _failures(workspace: Workspace) -> pd.DataFrame:
    """What nodes reported as failed, of the workloads as their files are now: a mended file is tried again.

    What the controller had to tell (a full mailbox, a silent node) is no fault of what was to be measured, and neither
    is a machine without its devices, data that were not to be had, or an index that did not answer.
    """
    try:
        failed = reads.mart(
            workspace.warehouse,
            "failed_runs",
            provider=workspace.provider.name,
            status="failed",
            told_by="node",
        )
    except WarehouseMissing:
        return pd.DataFrame()
    digests = {workload.digest for workload in workspace.measurable}
    if (
        "cause" in failed
    ):  # a warehouse that a refresh has not opened since has no such column yet, and no such row
        failed = failed[~failed["cause"].isin((MACHINE, DATA, INSTALL))]
    return failed[(failed["kind"] == "probe") | failed["workload_digest"].isin(digests)]


def _model(
    workspace: Workspace,
    model: StepTimeModel,
    workloads: Sequence[Workload],
    offers: Sequence[Offer],
    runs: pd.DataFrame,
) -> Model:
    """What the champion says of the workloads and types that it has met as they are defined now."""
    measured = model.trained  # what physics alone says of a mode is no reason not to measure it
    for workload in workloads:
        model = with_compressed(model, workload)
    known, _, _ = comparable(model, offers)
    conditions = job_conditions(workspace)
    met = [model.as_measured(workload) for workload in workloads if model.met_workload(workload)]
    choice_set: dict[str, ChoiceSet] = {}
    for workload in met if known else ():
        found = planned(workspace, model, workload, known, conditions=conditions)
        if found.ranked:
            choice_set[workload.name] = contending(model, workload, found, conditions=conditions)
    fresh = runs[~runs["run_id"].isin(model.trained_on)] if "run_id" in runs else runs.iloc[:0]
    trained = measured & {(workload.name, mode) for workload in met for mode in workload.modes}
    return Model(
        choice_set=choice_set,
        joint=model.joint,
        workloads=trained,
        types=frozenset(offer.instance_type.name for offer in known),
        fresh=valid_runs(fresh),
        expected_step=lambda setups: _expected(
            model, trained, [one.instance_type for one in offers], setups
        ),
    )


def _expected(
    model: StepTimeModel,
    workloads: Collection[Trained],
    types: Sequence[InstanceType],
    setups: pd.DataFrame,
) -> pd.DataFrame:
    """Predictions, and NaN where `workloads` lacks one, or the champion has not met an instance type as it is now."""
    met = {one.name for one in types if model.met_type(one)}
    trained = zip(setups["workload"], modes_of(setups), strict=True)
    known = np.array([one in workloads for one in trained], dtype=bool)
    known &= np.array(
        [met.issuperset(parse_cluster(str(one))) for one in setups["cluster"]], dtype=bool
    )
    columns = ["step_s", "step_low_s", "step_high_s"]
    predicted = (
        model.predict(setups[known])[columns]
        if known.any()
        else pd.DataFrame(columns=columns, dtype=float)
    )
    return predicted.reindex(setups.index)


def outdating(workspace: Workspace) -> str:
    """The sentence on runs that the first launch makes history; empty where the image has the torch of what is stored.

    Local hosts have this computer's torch, and measuring anew costs nothing there.
    """
    line = workspace.settings.ec2.torch_line
    if workspace.simulated or not line:
        return ""
    stored = reads.torch_lines(workspace.warehouse, workspace.provider.name)
    others = {other: runs for other, runs in stored.items() if other != line}
    if not others:
        return ""
    runs = sum(others.values())
    return (
        f"warning: the image that [ec2] ami_parameter names has torch {line}; {runs} run{'' if runs == 1 else 's'}"
        f" measured with torch {', '.join(sorted(others))} would become history with the first run measured now, and"
        " would have to be bought again; to keep them, name an image of their torch"
    )


def launch_seed(seed: int, lease_id: str) -> int:
    """A seed of its own for each lease, the same wherever it is computed."""
    return zlib.crc32(f"{seed}/{lease_id}".encode())


def dry_run(provider: str, max_usd: float | None) -> list[PlannedLaunch]:
    """What a refresh would buy now. Starts nothing and writes nothing; works before the first refresh too."""
    workspace = open_workspace(provider)
    now = datetime.now(UTC)
    launches = list_of(workspace, offers_now(workspace, now), max_usd)
    measured = dict.fromkeys(name for launch in launches for name in workload_names(launch))
    for plan in DataCarrier(workspace).plans(measured, ""):
        reporter().say(str(plan))
    return launches


def list_of(
    workspace: Workspace, offers: Sequence[Offer], max_usd: float | None
) -> list[PlannedLaunch]:
    """What would be bought of `offers`; as `dry_run`."""
    provider = workspace.provider.name
    try:
        frames = reads.training_frames(workspace.warehouse, provider)
    except WarehouseMissing:
        frames = {name: pd.DataFrame() for name in reads.TRAINING_FRAMES}
    champion = load_champion(workspace.home, provider)
    for sentence in filter(None, [nothing_to_buy(offers, workspace.settings.campaign.market)]):
        reporter().say(sentence)
    launches = shop(workspace, offers, _of_today(frames, workspace.measurable), champion, max_usd)
    if launches and (warning := outdating(workspace)):
        reporter().say(warning)
    if not launches:
        _say_why(champion, workspace.settings.campaign.max_usd if max_usd is None else max_usd)
    return launches


def _say_why(champion: Champion | None, left_usd: float) -> None:
    """Why a list is empty though there is money: with a champion, since nothing more would change a choice."""
    if champion is not None and left_usd > 0:
        reporter().say(STOPS)


def _of_today(
    frames: Mapping[str, pd.DataFrame], workloads: Sequence[Workload]
) -> dict[str, pd.DataFrame]:
    """Without what was measured here under a definition that has changed: until a refresh notes it, marts hold it."""
    current, noted = dict(frames), frames["workloads"]
    if len(noted):
        digests = dict(zip(noted["workload"], noted["digest"], strict=True))
        changed = [one.name for one in workloads if digests.get(one.name) != one.digest]
        runs, profiles = frames["runs"], frames["profiles"]
        current["runs"] = runs[~runs["workload"].isin(changed) | (runs["source"] != "srift")]
        current["profiles"] = profiles[~profiles["workload"].isin(changed)]
    return current


def serve_launch(
    workspace: Workspace, launch: PlannedLaunch, lease_id: str, tally: Tally
) -> Served:
    """Acquire, measure and release one cluster within every cap; its mailbox waits to be loaded.

    The caps are asked here, before anything is: a launch whose worst case does not fit comes back as a refused row.

    Where this is cut short (Ctrl-C), what was recorded until then is loaded before the error goes on its way.
    """
    seed = launch_seed(workspace.settings.campaign.seed, lease_id)
    carrier = DataCarrier(workspace)
    plans = carrier.plans(workload_names(launch), launch.cluster.members[0].region)
    tally.fetch_s |= {plan.name: fetch_s(plan) for plan in plans}
    places = {plan.name: plan.place for plan in plans}
    job = job_of(
        launch,
        workspace.settings,
        lease_id=lease_id,
        seed=seed,
        deadline_s=2 * launch.est_s,
        data=places,
    )
    allowed = allowance(workspace, launch, tally, datetime.now(UTC))
    if allowed.refusal:
        return _refused(job, allowed.refusal)
    lacking = {plan.name: plan.problem for plan in map(carrier.carry, plans) if plan.problem}
    job = without_data(job, lacking)
    if lacking and not job.items:
        return Served(
            lease_id=lease_id, outcome="failed: no data", rows=list(job.rows), lacked_data=lacking
        )
    patient_s = patience_s(workspace, launch, tally, allowed.deadline_s)
    job = replace(job, deadline_s=allowed.deadline_s, patience_s=patient_s)
    names = {
        run_id: _label(launch, wanted)
        for run_id, wanted in zip(job.run_setups, launch.items, strict=True)
    }

    def watch(run_id: str, done: int, usd: float | None) -> None:
        spent = None if usd is None else tally.usd + usd
        reporter().watch(
            f"{launch.cluster.name}: {names[planned_id(run_id)]}", tally.runs + done, spent
        )

    try:
        return serve(workspace.provider, job, stop_at=tally.stop_of(launch), watch=watch)
    except BaseException:
        with suppress(
            Exception
        ):  # the first error is the story; `srift reap` loads what this could not
            collect(workspace, lease_id.rpartition("-")[0], datetime.now(UTC))
        raise


def without_data(job: Job, lacking: Mapping[str, str]) -> Job:
    """`job` without the runs of workloads whose data are not to be had: each has its row, which says why."""
    for name, why in lacking.items():
        reporter().say(f"{name} is not measured: {why}")
    rows = tuple(
        item_row(
            job.lease_id,
            item,
            job.run_setups,
            AttemptEnd(how="failed", reason=lacking[item.workload]),
        )
        for item in job.items
        if item.workload in lacking
    )
    files = [(spec, path) for spec, path in job.files if spec.name not in lacking]
    items = tuple(item for item in job.items if item.workload not in lacking)
    return replace(job, items=items, rows=rows, files=files, lacking=lacking)


def serve(
    provider: Provider, job: Job, *, stop_at: float, watch: Watch, clock: Clock | None = None
) -> Served:
    """Run `job` until all is recorded or `stop_at` (on `clock`). Refusals, losses and a full disk come back as rows.

    So does whatever the provider could not do. However this ends, Ctrl-C included, the run under way gets its row, the
    machines are released, and the mailbox stays on disk until it has been loaded.
    """
    served = Served(lease_id=job.lease_id, rows=list(job.rows), lacked_data=dict(job.lacking))
    laps = Stopwatch(served.seconds, clock or Clock())
    try:
        with provider.acquire(
            job.cluster, lease_id=job.lease_id, deadline_s=job.deadline_s, seed=job.seed
        ) as running:
            served.mailbox = running.mailbox
            service = Session(running, job, served, stop_at=stop_at, watch=watch, laps=laps)
            try:
                service.prepare()
                service.serve()
            except OSError as error:
                service.lose(AttemptEnd(how="lost", reason=full_mailbox(error, running.mailbox)))
            except WorkloadChanged as error:
                service.lose(AttemptEnd(how="lost", reason=str(error)))
            except Exception as error:
                service.lose(AttemptEnd(how="lost", reason=str(error) or type(error).__name__))
                raise
            except BaseException as error:
                why = (
                    "by hand (Ctrl-C)"
                    if isinstance(error, KeyboardInterrupt)
                    else f"({type(error).__name__})"
                )
                service.lose(
                    AttemptEnd(
                        how="lost", reason=f"the controller was stopped {why}", interrupted=True
                    )
                )
                raise
            finally:
                service.finish()
    except NoCapacity as refusal:
        served.outcome = f"refused: {refusal}"
        served.rows.append(
            launch_row(job.lease_id, job.cluster.name, job.run_setups, "refused", str(refusal))
        )
    except (
        ProviderError
    ) as error:  # of this launch: the others, the model and the table do not wait for it
        served.outcome = f"failed: {error}"
        served.rows.append(
            launch_row(job.lease_id, job.cluster.name, job.run_setups, "failed", str(error))
        )
    finally:
        write_rows(served)  # what a full disk refused before: the machines' scratch is gone now
    laps.lap("release hosts")
    return served


def _refused(job: Job, why: str) -> Served:
    """Nothing was asked for: the row says which cap stood against it. That tells nothing of what is to be had."""
    served = Served(lease_id=job.lease_id, outcome=f"refused: {why}", over_cap=True)
    served.rows.append(launch_row(job.lease_id, job.cluster.name, job.run_setups, "refused", why))
    return served


def _label(launch: PlannedLaunch, wanted: PlannedRun) -> str:
    hosts = f"{len(wanted.nodes)} of {len(launch.cluster.members)} hosts"
    return " ".join(
        part for part in (wanted.kind, wanted.label if wanted.workload else "", "on", hosts) if part
    )
