"""Plan the launches of `srift measure`, on named clusters or on the most informative clusters.

The caps of a refresh apply.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from models.campaign.candidates import (
    PlannedRun,
    profile_of,
    profiled_lines,
    training_run,
    training_runs,
)
from models.campaign.shopping_list import PlannedLaunch, launch_of
from models.domain.cluster import Cluster, Offer, parse_cluster
from models.domain.setup_table import rows_of
from models.domain.suggestions import nearest_names
from models.domain.workload import Goal
from models.planner import planner
from models.planner.enumeration import cheapest_cluster
from models.step_time.machine_specs import computes
from warehouse import reads

from ..execution.job import Served
from ..execution.outcomes import Row
from ..market.offers import with_facts
from ..recommendation.case import Case
from ..recommendation.pilots import for_sale, launched_supply, pilots_for
from ..reporting.progress import reporter
from ..training.registry import Champion
from ..workspace.blas_threads import single_thread
from ..workspace.settings import SettingsError
from ..workspace.workspace import Workspace

_STEP = ("step_s", "step_low_s", "step_high_s")


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A user's request to measure a workload.

    clusters: clusters on which to measure, such as "2xNAME+1xOTHER". If empty, Srift chooses the
        runs that would improve the recommendation most.
    pilots: the maximum number of runs that Srift chooses if `clusters` is empty.
    """

    workload: str
    clusters: tuple[str, ...] = ()
    pilots: int = 3


def clusters_of(workspace: Workspace, wish: Wish, offers: Sequence[Offer]) -> list[Cluster]:
    """Return the clusters that `wish` names, each with the cheapest offers for its machines.

    The offers are from the market in [campaign] `market`. If that market does not sell all machines
    of a cluster, the offers are from any market.

    Raises SettingsError in these cases:

    - The workload is unknown or has no code.
    - A cluster has an unknown instance type, or cannot be launched.
    - No zone sells all machines of a cluster at a known price.
    """
    if workspace.settings.stated(wish.workload).entrypoint is None:
        raise SettingsError(
            f"{wish.workload} has no entrypoint: set it under [workloads.{wish.workload}] in"
            " srift.toml, or load measurements with `srift import FILE`"
        )
    return list(dict.fromkeys(_cluster(workspace, text, offers) for text in wish.clusters))


def _cluster(workspace: Workspace, text: str, offers: Sequence[Offer]) -> Cluster:
    """Return the cluster that `text` names, such as "2xNAME+1xOTHER", at its lowest price.

    Raises SettingsError if the text does not name a cluster, or if the cluster cannot be launched.
    """
    try:
        names = parse_cluster(text)
    except ValueError as error:
        raise SettingsError(f"--on {text}: {error}") from None
    cluster = cheapest_cluster(names, for_sale(workspace, offers)) or cheapest_cluster(
        names, offers
    )
    most = workspace.settings.campaign.max_hosts
    if cluster is None:
        near = nearest_names(names[-1], {offer.instance_type.name for offer in offers})
        why = f"no zone and market sells all these machines at a known price: {near}"
    elif len(names) > most:
        why = f"a campaign launches at most {most} machines ([campaign] max_hosts)"
    else:
        why = workspace.provider.launches(cluster)
    if cluster is None or why:
        raise SettingsError(f"--on {text}: {why}")
    return cluster


def case_of(
    workspace: Workspace, champion: Champion | None, wish: Wish, offers: Sequence[Offer]
) -> Case:
    facts = workspace.mart("workloads", workload=wish.workload)
    workload = with_facts(workspace.settings.workload(wish.workload), facts)
    measured = reads.measured_setups(workspace.warehouse, workspace.provider.name, [workload.name])
    with single_thread():
        return Case.of(workspace, champion, workload, offers, measured)


def launches_for(case: Case, wish: Wish) -> list[PlannedLaunch]:
    """Return the launches that `wish` requests.

    If `wish` names no clusters, Srift chooses the runs, and prints a message for each goal whose
    recommendation no run would improve.

    Raises:
        SettingsError: if a cluster is unknown, cannot be launched or cannot train the workload.
    """
    with single_thread():
        if not wish.clusters:
            return _pilots(case, wish.pilots) if case.known else _profiles(case, wish.pilots)
        clusters = clusters_of(case.workspace, wish, case.offers)
        return [
            launch_of(cluster, _runs_on(case, cluster), case.experience.costs)
            for cluster in clusters
        ]


def outcomes(case: Case, launches: Sequence[tuple[PlannedLaunch, Served]]) -> list[Row]:
    """Return a row for each run in `launches`, with predicted and measured step times.

    The column `reason` says why a run was not measured, and is empty for measured runs.

    launches: (launch, result of the launch) pairs.
    """
    mart = case.workspace.mart
    step_s = mart("runs").set_index("run_id")["step_s"].to_dict()
    reasons = mart("failed_runs").set_index("run_id")["reason"].to_dict()
    rows = []
    for launch, result in launches:
        for number, run in enumerate(launch.items):
            run_id = f"{result.lease_id}-{number:03d}"
            reason = reasons.get(run_id, "" if run_id in result.recorded else result.outcome)
            rows.append(
                {
                    "run_id": run_id,
                    **run.row(),
                    "market": launch.cluster.market,
                    **_prediction(case, run),
                    "step_s": step_s.get(run_id),
                    "measured": not reason,
                    "reason": reason,
                }
            )
    return rows


def _prediction(case: Case, run: PlannedRun) -> Row:
    """Return the predicted step time of `run` and its prediction interval, in seconds.

    The keys are column names, such as `predicted_step_s`. All values are None if `run` is not a
    training run, or if the model cannot predict it.
    """
    is_known = _known_types(case).issuperset(run.members)
    prediction: Row = dict.fromkeys(_STEP)
    if case.model is not None and run.kind == "train" and is_known:
        prediction = rows_of(case.model.predict(pd.DataFrame([run.row()])))[0]
    return {f"predicted_{column}": prediction[column] for column in _STEP}


def _known_types(case: Case) -> set[str]:
    return {offer.instance_type.name for offer in case.known}


def _runs_on(case: Case, cluster: Cluster) -> list[PlannedRun]:
    """Return the runs to measure on `cluster`: profiles, and one training run.

    A profile measures compute times on one machine of an instance type. Only types without a
    stored profile are profiled.

    The training run has the setup with the highest predicted throughput. If there is no such
    prediction, the run uses the workload's first mode (precision, strategy and switches) and the
    smallest possible global batch.

    Raises:
        SettingsError: if the cluster cannot train the workload.
    """
    run, costs = _quickest(case, cluster), case.experience.costs
    if run is None:
        first = replace(case.workload, modes=case.workload.modes[:1])
        # The first run has the smallest global batch that the cluster can train.
        run = next(iter(training_runs([first], [cluster], pd.DataFrame(), costs=costs)), None)
    if run is None:
        raise SettingsError(
            f"{cluster.name} cannot train {case.workload.name} in {first.modes[0]}. Srift tried"
            f" global batches from {first.global_batch_least} to {first.global_batch_most}. Name"
            " other machines, or change global_batch"
        )
    lines = profiled_lines(case.workspace.mart("profiles"))
    types = {offer.instance_type.name: offer.instance_type for offer in cluster.members}
    missing = [
        profile_of(case.workload, run.mode, instance_type, costs)
        for name, instance_type in types.items()
        if (run.workload, run.mode.alone, name) not in lines
    ]
    return [replace(item, reason="named by hand") for item in (*missing, run)]


def _quickest(case: Case, cluster: Cluster) -> PlannedRun | None:
    """Return the training run on `cluster` with the highest predicted throughput.

    Returns None if the model cannot predict the cluster, or if the workload has no valid setup
    there.
    """
    by_name = {offer.instance_type.name: offer for offer in cluster.members}
    if case.model is None or not by_name.keys() <= _known_types(case):
        return None
    supply = replace(
        launched_supply(case, list(by_name.values()), len(cluster.members)),
        fits=lambda other: "" if other.name == cluster.name else "another cluster",
    )
    setups = planner.candidates(case.workload, supply, case.model)
    if not setups:
        return None
    step_s = case.model.predict(pd.DataFrame([setup.row() for setup in setups]))["step_s"]
    best = int((step_s.to_numpy(float) / [setup.global_batch for setup in setups]).argmin())
    return training_run(setups[best], float(step_s.iloc[best]), case.experience.costs)


def _profiles(case: Case, count: int) -> list[PlannedLaunch]:
    """Return launches that profile the workload on the `count` cheapest instance types."""
    mode, costs = case.workload.modes[0], case.experience.costs
    clusters: dict[str, Cluster] = {}
    for offer in sorted(
        for_sale(case.workspace, case.offers), key=lambda offer: offer.usd_per_hour or 0.0
    ):
        cluster = Cluster(members=(offer,))
        able = computes(offer.instance_type.device, mode)
        if able and not case.workspace.provider.launches(cluster):
            clusters.setdefault(cluster.name, cluster)
    return [
        launch_of(
            cluster,
            [profile_of(case.workload, mode, cluster.members[0].instance_type, costs)],
            costs,
        )
        for cluster in list(clusters.values())[:count]
    ]


def _pilots(case: Case, count: int) -> list[PlannedLaunch]:
    """Return launches for up to `count` runs that would improve the recommendations most.

    Runs for goals with a deadline or budget come first. Runs on the same cluster in the same market
    share a launch. If no run would improve the recommendation for a goal, the reason is printed.
    """
    goals = case.workload.goals or (Goal(goal="cheapest"),)
    runs_by_setup: dict[str, tuple[Cluster, PlannedRun]] = {}
    for goal in sorted(goals, key=lambda goal: goal.constraint is None):
        question = replace(case, workload=replace(case.workload, goals=(goal,)))
        pilots = pilots_for(question, question.plan(), buyable=case.offers, count=count)
        if not pilots["runs"]:
            reporter().say(f"{case.workload.name}, {goal.goal}: {pilots['reason']}")
        for row in pilots["runs"]:
            cluster, run = row["planned"]
            run = replace(run, reason=f"a pilot of {goal.goal}")
            runs_by_setup.setdefault(str(run.row()), (cluster, run))
    launches: dict[tuple[str, str], tuple[Cluster, list[PlannedRun]]] = {}
    for cluster, run in list(runs_by_setup.values())[:count]:
        launches.setdefault((cluster.name, cluster.market), (cluster, []))[1].append(run)
    costs = case.experience.costs
    return [launch_of(cluster, runs, costs) for cluster, runs in launches.values()]
