"""The same verbs by hand. Parses, calls, prints, and turns every error that a user can make into a sentence."""

from __future__ import annotations

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
from pathlib import Path
from typing import Annotated, Any

import typer

from tasks.settings import SettingsError, load_settings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="On which instances should this PyTorch model be trained? A fresh, measured answer.",
)

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
            from tasks.printing import launches_as_rows, print_launches
            from tasks.shopping import dry_run as shop_only

            if provider == "ec2":
                from tasks.dry_run import as_rows, as_text
                from tasks.dry_run import dry_run as plan_only

                plan, cap_usd = plan_only(max_usd)
                _print_json(as_rows(plan)) if as_json else typer.echo(as_text(plan, cap_usd))
                return

            launches = shop_only(provider, max_usd)
            _print_json(launches_as_rows(launches)) if as_json else print_launches(launches)
            return
        from tasks.installation import open_installation, refuse_to_spend

        open_installation(provider)  # refused before anything starts
        refuse_to_spend(provider, max_usd)
        from flows.refresh import refresh as flow
        from tasks.own_server import own_server
        from tasks.printing import live_reporter
        from tasks.report import reporting_to

        with own_server(), reporting_to(live_reporter()):
            outcome = flow(provider, max_usd)
        _print_json(outcome) if as_json else _print_table(False, top=1)


@app.command()
def recommend(
    workload: Annotated[str, typer.Argument(help="A name under [workloads] in srift.toml, or of an import.")],
    deadline: Annotated[str | None, typer.Option(help="Cheapest within this time: 12h, 90m, 2d.")] = None,
    budget: Annotated[float | None, typer.Option(min=0.0, help="Fastest within this many dollars.")] = None,
    provider: Provider = "local",
    samples: Annotated[int | None, typer.Option(min=1, max=10**15, help="Samples, if not those of srift.toml.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, max=10**9, help="Batch, if not that of srift.toml.")] = None,
    market: Annotated[str, typer.Option(help="any, on-demand or spot.")] = "any",
    top: Annotated[int, typer.Option(min=1, help="How many clusters to show.")] = 5,
    pilots: Annotated[int, typer.Option(min=0, max=9, help="Runs to name that would settle an open choice.")] = 3,
    as_json: Json = False,
) -> None:
    """Ask the champion now, over the newest prices."""
    with explained():
        hours = _hours(deadline)
        if (hours is None) == (budget is None):
            raise typer.BadParameter("give either --deadline or --budget")
        if budget is not None and not math.isfinite(budget):
            raise typer.BadParameter(f"budget {budget} is no number of dollars")
        if market not in ("any", "on-demand", "spot"):
            raise typer.BadParameter(f"unknown market {market!r}; known: any, on-demand, spot")
        from tasks.answer import Question, answer
        from tasks.printing import print_recommendations

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
    file: Annotated[Path, typer.Argument(help="Measurement rows, CSV or Parquet.")],
    workloads: Annotated[
        Path | None, typer.Option(help="Facts: parameters, gradient_bytes, flops_per_sample ...")
    ] = None,
    as_json: Json = False,
) -> None:
    """Load measurements made elsewhere. Loading the same rows twice changes nothing."""
    with explained():
        from tasks.imports import import_measurements
        from warehouse.database import Warehouse

        warehouse = Warehouse(load_settings().home / "warehouse.duckdb")
        warehouse.migrate()
        imported = import_measurements(warehouse, file, workloads=workloads, now=datetime.now(UTC))
        _print_json(asdict(imported)) if as_json else typer.echo(_import_sentence(asdict(imported)))


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
        from tasks.backtest import backtest as compare
        from tasks.printing import print_scores

        report = compare(train, test, workloads=workloads, catalogue=catalogue, predictions=predictions)
        if as_json:
            _print_json(report.as_json())
        else:
            print_scores(report.summary, report.headline, report.sentences)


@app.command()
def status(provider: Provider = "local", as_json: Json = False) -> None:
    """What is running, what it costs, what is stale."""
    with explained():
        from tasks.printing import print_status
        from tasks.status import status_of

        found = status_of(provider)
        _print_json(found) if as_json else print_status(found)


@app.command()
def reap(provider: Provider = "local", as_json: Json = False) -> None:
    """End what should be dead, and load what it had measured."""
    with explained():
        from tasks.reaping import reap_now

        sentences = reap_now(provider)
        if as_json:
            _print_json({"ended": sentences})
        else:
            typer.echo("\n".join(sentences) or "nothing was left running")


@app.command()
def doctor(
    provider: Provider = "local",
    print_policies: Annotated[bool, typer.Option("--print-policies", help="Print IAM policies and end.")] = False,
    as_json: Json = False,
) -> None:
    """Check all that a refresh needs, and say how to put right what is wrong. Starts nothing, costs nothing."""
    with explained():
        from tasks import doctor as checks

        if print_policies:
            _print_json(checks.policies_of(load_settings()))
            return
        found = checks.examine(load_settings(), provider)
        _print_json(checks.as_json(found)) if as_json else typer.echo(checks.as_text(found))
        if not checks.well(found):
            raise SystemExit(1)


def main() -> None:
    """The console script `srift`. A closed terminal ends it as Ctrl-C does."""
    signal.signal(signal.SIGHUP, signal.default_int_handler)
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
        _fail(str(error), 1)


def _interruptions() -> tuple[type[BaseException], ...]:
    """Ctrl-C, and what Prefect makes of a signal to end."""
    ended = getattr(sys.modules.get("prefect.exceptions"), "TerminationSignal", KeyboardInterrupt)
    return KeyboardInterrupt, ended


def _foreseen() -> tuple[type[Exception], ...]:
    """Errors whose text says all; sought when there is one, since what raises them takes long to import."""
    from tasks.measurements import ImportRefused
    from tasks.providers.base import ProviderError
    from tasks.turn import Busy
    from warehouse.database import WarehouseError

    return ProviderError, WarehouseError, Busy, ImportRefused, OSError


def _fail(message: str, code: int) -> None:
    typer.echo(f"srift: {message}", err=True)
    raise SystemExit(code)


def _with_quiet_prefect() -> None:
    """Prefect in this process: its state under SRIFT_HOME, its log silent, and no services that a lone run needs.

    The task-run recorder and the event services fight over SQLite's lock and cost seconds; flow runs and artifacts
    are stored without them. With PREFECT_API_URL set, the server there decides.
    """
    home = load_settings().home
    home.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PREFECT_HOME", str(home / "prefect"))
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")  # it would print the traceback of every error first
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    if "PREFECT_API_URL" not in os.environ:
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
        raise typer.BadParameter(f"deadline {text!r} is not of the form 12h, 90m or 2d")
    return float(match[1]) * {"m": 1 / 60, "h": 1.0, "": 1.0, "d": 24.0}[match[2]]


def _print_table(as_json: bool, top: int) -> None:
    from tasks.printing import print_recommendations
    from tasks.published import published_rows

    rows = published_rows(load_settings().home / "published")
    _print_json(rows) if as_json else print_recommendations([row for row in rows if row["rank"] <= top])


def _print_json(body: Any) -> None:
    typer.echo(json.dumps(body, indent=2, default=_json_value, allow_nan=False))


def _json_value(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _import_sentence(imported: dict[str, Any]) -> str:
    return "\n".join([f"{imported['rows']} rows, {imported['new']} of them new", *imported["sentences"]])
