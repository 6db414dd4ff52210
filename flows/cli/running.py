"""Commands that start or end machines: refresh, measure, reap, status, spend."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from flows.cli.common import DryRun, Json, MaxUsd, Provider, ProviderName, settings, show

app = typer.Typer()


@app.command()
def refresh(
    provider: Provider = ProviderName.LOCAL,
    max_usd: MaxUsd = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Run the whole flow once: prices, measurements, model, table."""
    from tasks.reporting import tables
    from tasks.workspace.workspace import open_workspace

    if dry_run:
        _show_launches(as_json, provider, max_usd)
        return
    settings()

    def run() -> Any:
        from flows.refresh import refresh as flow

        return flow(provider, max_usd)

    outcome = _served(run, provider, max_usd)
    workspace = open_workspace(provider)

    def print_table() -> None:
        from tasks.recommendation.publication import after_refresh
        from warehouse.export import published_rows

        firsts = [row for row in published_rows(workspace.published) if row["rank"] == 1]
        rows, sentences = after_refresh(workspace, firsts)
        tables.print_recommendations(rows)
        typer.echo("".join(f"\n{sentence}" for sentence in sentences))

    show(as_json, outcome, print_table)


@app.command()
def measure(
    workload: Annotated[str, typer.Argument(help="A workload of srift.toml with an entrypoint.")],
    on: Annotated[
        list[str] | None,
        typer.Option(
            help="Machines such as 2xg5.xlarge; repeatable. Default: pilots of its goals."
        ),
    ] = None,
    max_usd: MaxUsd = None,
    provider: Provider = ProviderName.LOCAL,
    pilots: Annotated[int, typer.Option(min=1, max=9, help="Pilots at most, without --on.")] = 3,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Measure a workload on named machines, or its pilots, under the caps of a refresh."""
    from tasks.campaign.named import Wish
    from tasks.providers.base import ProviderError
    from tasks.reporting import tables

    wish = Wish(workload=workload, clusters=tuple(on or ()), pilots=pilots)
    if dry_run:
        _show_launches(as_json, provider, max_usd, wish)
        return
    settings()

    def run() -> Any:
        from flows.measure import measure_named

        return measure_named(wish, provider, max_usd)

    outcome = _served(run, provider, max_usd)
    show(as_json, outcome, lambda: tables.print_measured(outcome, provider))
    if not any(row["measured"] for row in outcome["runs"]):
        raise ProviderError("nothing was measured")


def _show_launches(as_json: bool, provider: str, max_usd: float | None, *wish: Any) -> None:
    from tasks.campaign.dry_run import dry_run
    from tasks.reporting.tables import print_launches

    rows = dry_run(provider, max_usd, *wish)
    show(as_json, rows, lambda: print_launches(rows))


def _served(run: Callable[[], Any], provider: str, max_usd: float | None) -> Any:
    """Run a flow with a Prefect server. Refuses what would fail before the server starts."""
    from tasks.workspace.home import check_home
    from tasks.workspace.locking import refuse_if_at_work
    from tasks.workspace.workspace import open_workspace, refuse_to_spend

    workspace = open_workspace(provider)
    refuse_to_spend(provider, max_usd)
    check_home(workspace.home)
    refuse_if_at_work(workspace.home)
    from tasks.reporting.progress import reporting_to
    from tasks.reporting.tables import live_reporter
    from tasks.workspace.prefect_server import own_server

    with own_server(), reporting_to(live_reporter()):
        return run()


@app.command()
def reap(
    provider: Annotated[
        ProviderName | None, typer.Option(help="Default: every provider used from here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """End overdue and orphaned machines, and load what they measured."""
    from tasks.execution.collect import reap_now
    from tasks.providers.base import NotSwept

    settings()
    try:
        ended = reap_now(provider)
    except NotSwept as error:
        body = {"ended": error.done, "not_swept": error.unswept}
        show(as_json, body, "\n".join(error.done))
        raise
    show(as_json, {"ended": ended, "not_swept": {}}, "\n".join(ended) or "nothing was left running")


@app.command()
def status(provider: Provider = ProviderName.LOCAL, as_json: Json = False) -> None:
    """What is running, what it costs, and what is stale."""
    from tasks.monitoring.status import status_of
    from tasks.reporting.tables import print_status

    settings()
    found = status_of(provider)
    show(as_json, found, lambda: print_status(found))


class SpendBy(StrEnum):
    DAY = "day"
    CAMPAIGN = "campaign"
    WORKLOAD = "workload"
    TYPE = "type"


@app.command()
def spend(
    by: Annotated[SpendBy, typer.Option(help="A row for each.")] = SpendBy.DAY,
    days: Annotated[
        int | None, typer.Option(min=1, help="Only launches that ended within so many days.")
    ] = None,
    provider: Provider = ProviderName.LOCAL,
    as_json: Json = False,
) -> None:
    """Dollars spent on measuring, and what held machines may still cost."""
    from tasks.monitoring.spend import spend_of
    from tasks.reporting.tables import print_spend

    settings()
    found = spend_of(provider, by, days=days)
    show(as_json, found, lambda: print_spend(found))
