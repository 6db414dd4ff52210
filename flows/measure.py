"""The flows that rent clusters and measure on them, under a dollar cap.

The measurements of a launch are loaded before the next launch starts.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from prefect import flow, task

from flows.market import market
from flows.reap import reap
from models.campaign.shopping_list import PlannedLaunch
from tasks.campaign.campaign import (
    affordable,
    serve_launch,
    torch_mismatch,
    with_requirements_installed,
    within,
)
from tasks.campaign.named import Wish, case_of, clusters_of, launches_for, outcomes
from tasks.campaign.spending import Tally, keep_spending, money_short
from tasks.doctor.checks import refuse_unless_well
from tasks.execution.claims import claim, settle
from tasks.execution.collect import collect_launch, refuse_unless_swept
from tasks.execution.job import Served
from tasks.market.offers import current_offers, offers_now
from tasks.providers.base import NotSwept, ProviderError
from tasks.reporting.progress import MONEY_SHORT, announce, reporter
from tasks.training.registry import load_champion
from tasks.workspace.locking import patience_s, refresh_lock
from tasks.workspace.settings import SettingsError
from tasks.workspace.workspace import Workspace, new_refresh_id, open_workspace, refuse_to_spend

serve = task(serve_launch)
load = task(collect_launch)


def prepare(workspace: Workspace, refresh_id: str, max_usd: float | None) -> None:
    """End overdue and orphaned machines with the flow `reap`, and store the current prices.

    max_usd: dollar cap of the refresh. None means the cap in srift.toml. With 0, nothing is
        measured.
    Raises NotSwept if `reap` could not check a region or a launch. If the refresh spends no money
    (local hosts, or a cap of 0), a note is printed instead.
    """
    provider = workspace.provider.name
    if max_usd != 0:
        for limit in workspace.provider.limits():
            reporter().say(f"note: {limit}")
    try:
        reap(provider)
    except NotSwept as error:
        if workspace.spends_money and max_usd != 0:
            raise
        reporter().say(f"note: {error}")
    market(provider, refresh_id, republish=False)


@flow(name="measure", flow_run_name="measure {provider}", log_prints=True)
def measure(
    refresh_id: str, provider: str = "local", max_usd: float | None = None
) -> dict[str, Any]:
    """Rent clusters and measure on them, the most informative cluster first.

    The flow ends at the cap on dollars or minutes, or when no further launch is useful.
    max_usd: dollar cap. None means the cap in srift.toml. With 0, nothing is measured.
    Returns the number of launches, the number of measurements per status, and the dollars spent.
    """
    workspace = open_workspace(provider)
    if max_usd != 0:
        workspace = with_requirements_installed(workspace)  # before `Tally.of` starts the time cap
    champion = load_champion(workspace.home, provider)
    tally = Tally.of(workspace, max_usd, refresh_id)
    _serve(workspace, within(workspace, champion, tally), tally)
    return tally.summary()


@flow(name="measure-named", flow_run_name="measure-named {provider}", log_prints=True)
def measure_named(
    wish: Wish, provider: str = "local", max_usd: float | None = None
) -> dict[str, Any]:
    """Measure a workload, and leave the published table unchanged.

    The dollar and time caps of a refresh apply.

    wish: the workload and its clusters. Without clusters, Srift measures the workload on the most
        informative clusters.

    Returns a dictionary: `refresh_id`, `runs` (predicted and measured values) and `spent` (the
    number of launches, the number of measurements per status, and the dollars).

    Raises:
        SettingsError: if the provider, the workload or a cluster cannot be used, or if `max_usd`
            is 0.
        Busy: if a refresh is already running in this SRIFT_HOME.
        ProviderError: if a check of the installation fails, or if the Python requirements of the
            workload cannot be installed.
    """
    refuse_to_spend(provider, max_usd)
    if max_usd == 0:
        raise SettingsError("--max-usd 0 measures nothing: raise the cap, or add --dry-run")
    workspace = open_workspace(provider)
    now = datetime.now(UTC)
    clusters_of(workspace, wish, offers_now(workspace, now))
    refuse_unless_well(workspace.settings, provider, max_usd)
    refresh_id = new_refresh_id(now)
    with refresh_lock(workspace.home, refresh_id, patience_s=patience_s()):
        prepare(workspace, refresh_id, max_usd)
        workspace = with_requirements_installed(workspace)
        if wish.workload not in workspace.settings.workloads:
            raise ProviderError(
                f"the requirements of {wish.workload} cannot be installed, so nothing was measured."
                " The output above has the reason"
            )
        champion = load_champion(workspace.home, provider)
        case = case_of(workspace, champion, wish, current_offers(workspace))
        tally = Tally.of(workspace, max_usd, refresh_id)
        launches = affordable(workspace, launches_for(case, wish), tally)
        made = _serve(workspace, launches, tally)
    return {"refresh_id": refresh_id, "runs": outcomes(case, made), "spent": tally.summary()}


def _serve(
    workspace: Workspace, launches: Iterable[PlannedLaunch], tally: Tally
) -> list[tuple[PlannedLaunch, Served]]:
    """Run the launches one after another, and return pairs (planned launch, result).

    A launch rents one cluster and measures on it. Its measurements are loaded before the next
    launch is taken from `launches`.

    launches: the planned launches. An iterator can use the loaded measurements to plan a launch.
    tally: counts the dollars and seconds spent.
    """
    made, refresh_id = [], tally.refresh_id
    if tally.cap_usd:
        refuse_unless_swept(workspace, datetime.now(UTC))
        if warning := torch_mismatch(workspace):
            reporter().say(warning)
        if workspace.spends_money:
            keep_spending(workspace, datetime.now(UTC))
    # Another SRIFT_HOME that shares the warehouse must not spend the same dollars. So reserve the
    # dollars before `launches` reads how many dollars are left this month.
    claim(workspace, refresh_id, tally.cap_usd, datetime.now(UTC))
    try:
        for number, launch in enumerate(launches):
            served = serve(workspace, launch, f"{refresh_id}-{number:02d}", tally)
            tally.add(served, load(workspace, served, datetime.now(UTC)), launch.cluster)
            reporter().say(
                f"  {launch.cluster.name}: {len(served.recorded)} runs, {served.outcome}"
            )
            made.append((launch, served))
    finally:
        reporter().finish()
        settle(workspace, datetime.now(UTC), over=refresh_id)
    if tally.cap_usd and (short := money_short(workspace, tally, datetime.now(UTC))):
        reporter().say(short)
        announce(MONEY_SHORT, f"provider.{workspace.provider.name}", short)
    return made
