"""The same verbs by hand. Parses, calls, prints, and turns every error that a user can make into a sentence."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from tasks.workspace.credential import read_credential, served_at
from tasks.workspace.settings import SettingsError, load_settings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="On which instances should this PyTorch model be trained? A fresh, measured answer.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"srift {version('srift')}")
        raise typer.Exit


@app.callback()
def srift(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """On which instances should this PyTorch model be trained? A fresh, measured answer."""


Provider = Annotated[str, typer.Option(help="Where machines come from: local or ec2.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to standard output, nothing else there.")]


@app.command()
def refresh(
    provider: Provider = "local",
    max_usd: Annotated[float | None, typer.Option(min=0.0, help="Dollar cap; 0 measures nothing.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Print what would be bought; start nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Run the whole flow once: prices, measurements, model, table."""
    with explained("machines released, measurements loaded, the table as it was; `srift refresh` goes on"):
        if dry_run:
            from tasks.campaign.campaign import dry_run as shop_only
            from tasks.reporting.tables import launches_as_rows, print_launches
            from tasks.workspace.workspace import capabilities

            if capabilities(provider).spends_money:
                from tasks.campaign.dry_run import as_rows, as_text
                from tasks.campaign.dry_run import dry_run as plan_only

                plan, cap_usd = plan_only(provider, max_usd)
                _print_json(as_rows(plan)) if as_json else typer.echo(as_text(plan, cap_usd))
                return

            launches = shop_only(provider, max_usd)
            _print_json(launches_as_rows(launches)) if as_json else print_launches(launches)
            return
        from tasks.workspace.locking import refuse_if_at_work
        from tasks.workspace.workspace import open_workspace, refuse_to_spend

        workspace = open_workspace(provider)  # refused before anything starts
        refuse_to_spend(provider, max_usd)
        from tasks.workspace.home import check_home

        check_home(load_settings().home)  # a server that cannot write takes two minutes to say so
        refuse_if_at_work(workspace.home)
        from flows.refresh import refresh as flow
        from tasks.reporting.progress import reporting_to
        from tasks.reporting.tables import live_reporter
        from tasks.workspace.prefect_server import own_server

        with own_server(), reporting_to(live_reporter()):
            outcome = flow(provider, max_usd)
        if as_json:
            _print_json(outcome)
            return
        from tasks.recommendation.publication import after_refresh, published_rows
        from tasks.reporting.tables import print_recommendations

        firsts = [row for row in published_rows(workspace.published) if row["rank"] == 1]
        rows, sentences = after_refresh(workspace, firsts)
        print_recommendations(rows)
        typer.echo("".join(f"\n{sentence}" for sentence in sentences))


@app.command()
def recommend(
    workload: Annotated[str, typer.Argument(help="A name under [workloads] in srift.toml, or of an import.")],
    deadline: Annotated[
        str | None, typer.Option(help="Cheapest within this time: 12h, 90m, 2d; 12 is 12 hours.")
    ] = None,
    budget: Annotated[float | None, typer.Option(min=0.0, help="Fastest within this many dollars.")] = None,
    provider: Annotated[
        str | None, typer.Option(help="local or ec2; if not given, the one that knows the workload, local before ec2.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, max=10**15, help="Samples, if not those of srift.toml; a must for what is known by imports alone."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, max=10**9, help="Global batch, if not that of srift.toml; a must for what is known by imports alone."
        ),
    ] = None,
    market: Annotated[str, typer.Option(help="any, on-demand or spot.")] = "any",
    top: Annotated[int, typer.Option(min=1, help="How many clusters to show.")] = 5,
    pilots: Annotated[
        int,
        typer.Option(
            min=0,
            max=9,
            help="Runs to name, with their price, that would settle the choice; buys nothing.",
        ),
    ] = 3,
    as_json: Json = False,
) -> None:
    """Ask the model in force now, over the newest prices. That nothing meets the constraint is an answer: exit 0."""
    with explained():
        hours = _hours(deadline)
        if (hours is None) == (budget is None):
            raise typer.BadParameter("give either --deadline or --budget")
        if budget is not None and not math.isfinite(budget):
            raise typer.BadParameter(f"budget {budget} is no number of dollars")
        if market not in ("any", "on-demand", "spot"):
            from models.domain.suggestions import nearest_names

            markets = ("any", "on-demand", "spot")
            near = nearest_names(market.lower(), markets)
            known = f"known: {', '.join(markets)}"
            raise typer.BadParameter(f"unknown market {market!r}; {near if near == known else f'{near} {known}'}")
        from tasks.reporting.progress import working

        with working(f"asking the model in force about {workload}"):
            from tasks.recommendation.ask import Question, answer
            from tasks.reporting.tables import print_recommendations

            if provider is None:
                from tasks.recommendation.known_workloads import provider_that_knows
                from warehouse.database import Warehouse

                settings = load_settings()
                provider, why = provider_that_knows(Warehouse(settings.home / "warehouse.duckdb"), settings, workload)
                if why:
                    typer.echo(f"note: {why}", err=True)
            asked = Question(workload=workload, hours=hours, usd=budget, samples=samples, batch=batch)
            rows = answer(provider, asked, market=market, top=top, pilots=pilots)
        _print_json(rows) if as_json else print_recommendations(rows)


@app.command()
def table(
    top: Annotated[int, typer.Option(min=1, help="How many clusters a goal to show; --json has all.")] = 1,
    as_json: Json = False,
) -> None:
    """The published table: the first choice for every workload and goal, and with --top its close rivals."""
    with explained():
        _print_table(as_json, top)


@app.command("import")
def import_(
    file: Annotated[Path | None, typer.Argument(help="Measurement rows, CSV or Parquet.")] = None,
    workloads: Annotated[
        Path | None, typer.Option(help="Facts: parameters, gradient_bytes, flops_per_sample ...; with FILE or alone.")
    ] = None,
    provider: Annotated[
        str | None,
        typer.Option(help="Whose workloads the facts are of, beside those of FILE: ec2 (default) or local."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print how it is read; load nothing.")] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Load what looks mistaken: units, speeds beyond a device's peak, misspelt types."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Load measurements made elsewhere, facts of workloads, or both. Loading the same again changes nothing."""
    with explained():
        if file is None and workloads is None:
            raise typer.BadParameter("give a file of measurements, --workloads with a file of facts, or both")
        from models.domain.suggestions import nearest_names
        from tasks.data_files.imports import ImportFiles, import_measurements
        from tasks.workspace.workspace import PROVIDERS
        from warehouse.database import Warehouse

        if provider is not None and provider not in PROVIDERS:
            raise typer.BadParameter(f"unknown provider {provider!r}; {nearest_names(provider, PROVIDERS)}")
        settings = load_settings()
        warehouse = Warehouse(settings.home / "warehouse.duckdb")
        if not dry_run:
            warehouse.migrate()
        imported = import_measurements(
            warehouse,
            ImportFiles(measurements=file, workloads=workloads, provider=provider),
            datetime.now(UTC),
            local_types=settings.local.instance_types,
            force=force,
            dry_run=dry_run,
        )
        _print_json(asdict(imported)) if as_json else typer.echo(imported.as_text())


@app.command()
def forget(
    import_id: Annotated[
        str | None, typer.Argument(help="An import's id, or how it begins; `srift import` prints it, --list too.")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Print all imports and end.")] = False,
    as_json: Json = False,
) -> None:
    """Undo an import: its rows and facts no longer count. Importing again brings them back; nothing is deleted."""
    with explained():
        from tasks.data_files.imports import forget_import, list_imports
        from tasks.reporting.tables import print_imports
        from warehouse.database import Warehouse

        if (import_id is None) != list_all:
            raise typer.BadParameter("give either the id of an import or --list")
        warehouse = Warehouse(load_settings().home / "warehouse.duckdb")
        if not warehouse.path.exists():
            _print_json([]) if as_json and list_all else typer.echo("nothing was ever imported")
            return
        warehouse.migrate()
        if import_id is None:
            found = list_imports(warehouse)
            _print_json(found) if as_json else print_imports(found)
            return
        forgotten = forget_import(warehouse, import_id, datetime.now(UTC))
        _print_json(asdict(forgotten)) if as_json else typer.echo(forgotten.sentence)


@app.command()
def workloads(as_json: Json = False) -> None:
    """What is known of each workload: by which provider, on which devices, from how many rows, and its facts."""
    with explained():
        from tasks.recommendation.known_workloads import known_workloads
        from tasks.reporting.tables import print_workloads
        from warehouse.database import Warehouse

        settings = load_settings()
        known = known_workloads(Warehouse(settings.home / "warehouse.duckdb"), settings)
        (_print_json if as_json else print_workloads)([one.as_json() for one in known])


@app.command()
def backtest(
    train: Annotated[Path, typer.Argument(help="Measurement rows to fit on, CSV or Parquet.")],
    test: Annotated[Path, typer.Argument(help="Measurement rows to predict, CSV or Parquet.")],
    workloads: Annotated[
        Path | None, typer.Option(help="Facts: parameters, gradient_bytes, flops_per_sample ...")
    ] = None,
    catalogue: Annotated[Path | None, typer.Option(help="Instance types: vcpu, gpu_count, network_gbps ...")] = None,
    predictions: Annotated[Path | None, typer.Option(help="CSV to write: TEST with what was predicted.")] = None,
    as_json: Json = False,
) -> None:
    """Fit on one file, predict another: errors and interval coverage by workload and cluster size."""
    with explained():
        from tasks.data_files.backtest import backtest as compare
        from tasks.reporting.tables import print_scores

        report = compare(train, test, workloads=workloads, catalogue=catalogue, predictions=predictions)
        if as_json:
            _print_json(report.as_json())
        else:
            print_scores(report.summary, report.headline, report.sentences)


@app.command()
def status(provider: Provider = "local", as_json: Json = False) -> None:
    """What is running, what it costs, what is stale."""
    with explained():
        from tasks.monitoring.status import status_of
        from tasks.reporting.tables import print_status

        found = status_of(provider)
        _print_json(found) if as_json else print_status(found)


@app.command()
def reap(provider: Provider = "local", as_json: Json = False) -> None:
    """End what should be dead, and load what it had measured."""
    with explained():
        from tasks.execution.collect import reap_now
        from tasks.providers.base import NotSwept

        try:
            sentences, unswept = reap_now(provider), None
        except NotSwept as error:
            sentences, unswept = error.done, error
        if as_json:
            _print_json({"ended": sentences, "not_swept": unswept.unswept if unswept else {}})
        elif sentences or not unswept:
            typer.echo("\n".join(sentences) or "nothing was left running")
        if unswept:
            raise unswept


@app.command()
def doctor(
    provider: Provider = "local",
    print_policies: Annotated[bool, typer.Option("--print-policies", help="Print IAM policies and end.")] = False,
    rebuild_warehouse: Annotated[
        bool,
        typer.Option("--rebuild-warehouse", help="Copy what can be read of a damaged warehouse to a new one, and end."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check all that a refresh needs, and say how to put right what is wrong. Starts nothing, costs nothing."""
    with explained():
        from tasks.doctor import findings
        from tasks.doctor import report as checks

        if print_policies:
            _print_json(checks.policies_of(load_settings()))
            return
        if rebuild_warehouse:
            said = checks.rebuild_warehouse(load_settings().home)
            _print_json({"says": said}) if as_json else typer.echo(said)
            return
        found = checks.examine(load_settings(), provider)
        _print_json(findings.as_json(found)) if as_json else typer.echo(findings.as_text(found))
        if not findings.well(found):
            raise SystemExit(1)


# Objects made before the garbage collector looks at them: importing makes few that are garbage, and looking at them
# every 700 took a fifth of what a short command takes.
_COLLECT_AFTER = (50_000, 20, 50)


def main() -> None:
    """The console script `srift`. A closed terminal ends it as Ctrl-C does."""
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    gc.set_threshold(*_COLLECT_AFTER)
    app()


@contextmanager
def explained(interrupted: str = "nothing was changed") -> Iterator[None]:
    """Exit 2 on misuse, 1 on a failure, each with a sentence; a traceback is only for what nobody foresaw."""
    try:
        _with_quiet_prefect()  # before anything imports it
    except SettingsError as error:
        _fail(str(error), 2)
    except OSError as error:
        _fail(f"SRIFT_HOME cannot be used: {error}. Nothing was started", 1)
    try:
        yield
    except SettingsError as error:
        _fail(str(error), 2)
    except _interruptions():
        _fail(f"interrupted: {interrupted}", 1)
    except _foreseen() as error:
        bare = getattr(error, "errno", None) is not None  # of the system, without a sentence of ours
        _fail((_of_the_disk(error) if bare else None) or str(error), 1)
    except Exception as error:
        said = _of_the_disk(error)
        if said is None:
            raise
        _fail(said, 1)


def _interruptions() -> tuple[type[BaseException], ...]:
    """Ctrl-C, and what Prefect makes of a signal to end."""
    ended = getattr(sys.modules.get("prefect.exceptions"), "TerminationSignal", KeyboardInterrupt)
    return KeyboardInterrupt, ended


def _foreseen() -> tuple[type[Exception], ...]:
    """Errors whose text says all; sought when there is one, since what raises them takes long to import."""
    from tasks.data_files.measurements import ImportRefused
    from tasks.providers.base import ProviderError
    from tasks.workspace.locking import Busy
    from warehouse.database import WarehouseError

    cancelled = getattr(sys.modules.get("prefect.exceptions"), "CancelledRun", Busy)  # a refresh that came second
    return ProviderError, WarehouseError, Busy, ImportRefused, OSError, cancelled


_FULL_DISK = ("database or disk is full", "No space left on device", "Disk quota exceeded")  # SQLite, the system


def _of_the_disk(error: BaseException) -> str | None:
    """What a full or read-only disk has to do with an error of whichever library, in a sentence; None: nothing."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)
    for one in chain:
        number, said = getattr(one, "errno", None), str(one).partition("\n")[0]
        if number in (errno.ENOSPC, errno.EDQUOT) or any(word in said for word in _FULL_DISK):
            return f"the disk is full: {said}. What was stored before stays; free some space and try again"
        if number == errno.EROFS or "readonly database" in said:
            return f"{said}: make it writable, or set SRIFT_HOME to a folder that is"
    if type(error).__module__.partition(".")[0] in ("prefect", "httpx"):  # a server says no more than "error 500"
        from tasks.providers.base import ProviderError
        from tasks.workspace.home import check_home

        try:
            check_home(load_settings().home)
        except ProviderError as wrong:
            return f"{wrong}. It showed as: {str(error).partition(chr(10))[0]}"
    return None


def _fail(message: str, code: int) -> None:
    typer.echo(f"srift: {message}", err=True)
    raise SystemExit(code)


def _with_quiet_prefect() -> None:
    """Prefect in this process: its state under SRIFT_HOME, its log silent, and no services that a lone run needs.

    The task-run recorder and the event services fight over SQLite's lock and cost seconds; flow runs and artifacts
    are stored without them. With PREFECT_API_URL set, the server there decides; it is shown this home's credential only
    where it is the one that `make up` serves from this home now, and no other credential is set.
    """
    home = load_settings().home
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ.setdefault("PREFECT_HOME", str(home / "prefect"))
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")  # it would print the traceback of every error first
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    if "PREFECT_API_URL" in os.environ:
        credential = read_credential(home)
        if credential and urlsplit(os.environ["PREFECT_API_URL"]).netloc == served_at(home):
            os.environ.setdefault("PREFECT_API_AUTH_STRING", credential)
    else:
        for service in _IDLE_SERVICES:
            os.environ.setdefault(f"PREFECT_SERVER_SERVICES_{service}_ENABLED", "false")


_IDLE_SERVICES = (
    *("TASK_RUN_RECORDER", "EVENT_PERSISTER", "EVENT_LOGGER", "TRIGGERS", "SCHEDULER", "LATE_RUNS"),
    *("PAUSE_EXPIRATIONS", "CANCELLATION_CLEANUP", "FOREMAN", "REPOSSESSOR"),
)


def _hours(text: str | None) -> float | None:
    """Hours of `12h`, `90m`, `2d` or a bare number of hours."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mhd]?)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise typer.BadParameter(f"deadline {text!r} is not a time above zero of the form 12h, 90m or 2d")
    return float(match[1]) * {"m": 1 / 60, "h": 1.0, "": 1.0, "d": 24.0}[match[2]]


def _print_table(as_json: bool, top: int) -> None:
    from tasks.recommendation.publication import published_rows
    from tasks.reporting.tables import print_recommendations

    rows = published_rows(load_settings().home / "published")
    _print_json(rows) if as_json else print_recommendations([row for row in rows if row["rank"] <= top])


def _print_json(body: Any) -> None:
    typer.echo(json.dumps(body, indent=2, default=_json_value, allow_nan=False))


def _json_value(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
