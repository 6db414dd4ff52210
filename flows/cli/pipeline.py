"""Define the commands that start, end and show machines: refresh, measure, reap, status, spend."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import typer

from flows.cli.common import DryRun, Json, MaxUsd, Provider, ProviderName, settings, show

app = typer.Typer()


@app.command()
def refresh(
    provider: Provider = "local",
    max_usd: MaxUsd = None,
    month_spent: Annotated[
        float | None,
        typer.Option(help="Dollars spent this month. Needed only if Srift's record is lost."),
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Update the prices, the measurements, the model and the published table once."""
    from tasks.workspace.workspace import spends_money

    usable = spends_money(provider) and not dry_run
    if month_spent is not None and not (usable and 0 <= month_spent < math.inf):
        raise typer.BadParameter(
            "--month-spent must be at least 0 dollars, needs --provider ec2, and cannot be used"
            " with --dry-run"
        )
    if dry_run:
        _show_launches(as_json, provider, max_usd)
        return
    with _server(provider, max_usd):
        from flows.refresh import refresh as flow
        from tasks.campaign.spending import keep_spending
        from tasks.workspace.workspace import open_workspace

        if month_spent is not None:
            keep_spending(open_workspace(provider), datetime.now(UTC), month_spent)
        outcome = flow(provider, max_usd)
    show(as_json, outcome, lambda _: _print_published(provider))


def _print_published(provider: str) -> None:
    """Print the best published cluster on `provider` for each workload and goal."""
    from tasks.reporting.tables import print_recommendations
    from warehouse.export import published_rows

    rows = published_rows(settings().home / "published")
    print_recommendations([r for r in rows if r["rank"] == 1 and r["provider"] == provider])


@app.command()
def measure(
    workload: Annotated[str, typer.Argument(help="A workload of srift.toml with an entrypoint.")],
    on: Annotated[
        list[str] | None,
        typer.Option(
            help="Cluster such as 2xg5.xlarge; repeatable. Default: the most informative clusters."
        ),
    ] = None,
    max_usd: MaxUsd = None,
    provider: Provider = "local",
    pilots: Annotated[
        int, typer.Option(min=1, max=9, help="Maximum number of runs if --on is not given.")
    ] = 3,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Measure a workload on the clusters of --on. Default: the most informative clusters.

    The dollar and time caps of a refresh apply.
    """
    from tasks.campaign.named import Wish
    from tasks.providers.base import ProviderError
    from tasks.reporting.tables import print_measured

    wish = Wish(workload=workload, clusters=tuple(on or ()), pilots=pilots)
    if dry_run:
        _show_launches(as_json, provider, max_usd, wish)
        return
    with _server(provider, max_usd):
        from flows.measure import measure_named

        outcome = measure_named(wish, provider, max_usd)
    show(as_json, outcome, lambda found: print_measured(found, provider))
    if not any(row["measured"] for row in outcome["runs"]):
        raise ProviderError("no run was measured: the output above has the reason for each run")


def _show_launches(as_json: bool, provider: str, max_usd: float | None, *wish: Any) -> None:
    from tasks.campaign.dry_run import dry_run
    from tasks.reporting.tables import print_launches

    show(as_json, dry_run(provider, max_usd, *wish), print_launches)


@contextmanager
def _server(provider: str, max_usd: float | None) -> Iterator[None]:
    """Check that the command can start, and run Prefect's API server during the block.

    The checks cover the dollar cap `max_usd`, SRIFT_HOME and the refresh lock. They come first,
    because the server starts slowly.
    """
    from tasks.workspace.home import check_home
    from tasks.workspace.locking import Busy, at_work
    from tasks.workspace.workspace import refuse_to_spend

    home = settings().home
    refuse_to_spend(provider, max_usd)
    check_home(home)
    other = at_work(home)
    if other is not None:
        raise Busy(other)
    from tasks.workspace.prefect_server import local_server

    with local_server():
        yield


@app.command()
def reap(
    provider: Annotated[
        ProviderName | None, typer.Option(help="Default: every provider used so far.")
    ] = None,
    as_json: Json = False,
) -> None:
    """End machines that are overdue or whose launcher has died, and load their measurements."""
    from tasks.execution.collect import reap_now
    from tasks.providers.base import NotSwept

    settings()
    try:
        ended = reap_now(provider)
    except NotSwept as error:
        show(as_json, {"ended": error.done, "not_swept": error.unswept}, "")
        raise
    text = "" if ended else "nothing was left running"
    show(as_json, {"ended": ended, "not_swept": {}}, text)


@app.command()
def status(provider: Provider = "local", as_json: Json = False) -> None:
    """Show what is running, what it costs, and which data are stale."""
    from tasks.monitoring.status import status_of
    from tasks.reporting.tables import print_status

    settings()
    show(as_json, status_of(provider), print_status)


@app.command()
def spend(
    by: Annotated[
        Literal["day", "campaign", "workload", "type"], typer.Option(help="How to group the rows.")
    ] = "day",
    days: Annotated[
        int | None, typer.Option(min=1, help="Only launches that ended in the last DAYS days.")
    ] = None,
    provider: Provider = "local",
    as_json: Json = False,
) -> None:
    """Show the cost of ended launches, and the current and maximum cost of running launches."""
    from tasks.monitoring.spend import spend_of
    from tasks.reporting.tables import print_spend

    settings()
    show(as_json, spend_of(provider, by, days=days), print_spend)
