"""The same verbs by hand. Parses, calls, prints, and turns every error that a user can make into a sentence."""

from __future__ import annotations

import errno
import gc
import inspect
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from models.domain.suggestions import nearest_names
from tasks.workspace.credential import read_credential, served_at

if TYPE_CHECKING:
    from tasks.workspace.settings import Settings
    from warehouse.database import Warehouse

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="On which instances should this PyTorch model be trained? A fresh, measured answer.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"srift {version('srift')}")
        raise typer.Exit


@app.callback()
def srift(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """On which instances should this PyTorch model be trained? A fresh, measured answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a verb prints: with --json its `body`, else its text or whatever `shown` prints; `error` is raised then."""

    body: Any
    shown: str | Callable[[], object]
    error: BaseException | None = None


Provider = Annotated[str, typer.Option(help="Where machines come from: local or ec2.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print JSON to standard output, nothing else there.")
]


def verb(
    name: str | None = None, interrupted: str = "nothing was changed"
) -> Callable[[Callable[..., Answer]], Any]:
    """A command with the options that the function takes, or the fields of the dataclass that it takes, and --json.

    Its errors are explained; on Ctrl-C the message says that it was `interrupted`, and what that leaves.
    """

    def register(function: Callable[..., Answer]) -> Any:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        options: Any = next(
            (one.annotation for one in parameters if is_dataclass(one.annotation)), None
        )
        if options is not None:
            parameters = inspect.signature(options, eval_str=True).parameters.values()

        @wraps(function)
        def command(as_json: bool, **words: Any) -> None:
            with explained(interrupted):
                answer = function(**words) if options is None else function(options(**words))
                if as_json:
                    typer.echo(
                        json.dumps(answer.body, indent=2, default=_json_value, allow_nan=False)
                    )
                elif callable(answer.shown):
                    answer.shown()
                elif answer.shown:
                    typer.echo(answer.shown)
                if answer.error is not None:
                    raise answer.error

        last = inspect.Parameter(
            "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json
        )
        command.__signature__ = inspect.Signature([*parameters, last])  # type: ignore[attr-defined]
        return app.command(name)(command)

    return register


@verb(
    interrupted="machines released, measurements loaded, the table as it was; `srift refresh` goes on"
)
def refresh(
    provider: Provider = "local",
    max_usd: Annotated[
        float | None, typer.Option(min=0.0, help="Dollar cap; 0 measures nothing.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option(help="Print what would be bought; start nothing.")
    ] = False,
) -> Answer:
    """Run the whole flow once: prices, measurements, model, table."""
    from tasks.reporting import tables
    from tasks.workspace.workspace import capabilities, open_workspace, refuse_to_spend

    if dry_run and capabilities(provider).spends_money:
        from tasks.campaign.dry_run import as_rows, as_text
        from tasks.campaign.dry_run import dry_run as planned

        plan, cap_usd = planned(provider, max_usd)
        return Answer(as_rows(plan), as_text(plan, cap_usd))
    if dry_run:
        from tasks.campaign.campaign import dry_run as bought

        launches = bought(provider, max_usd)
        return Answer(tables.launches_as_rows(launches), lambda: tables.print_launches(launches))
    from tasks.workspace.home import check_home
    from tasks.workspace.locking import refuse_if_at_work

    workspace = open_workspace(provider)  # refused before anything starts
    refuse_to_spend(provider, max_usd)
    check_home(workspace.home)  # a server that cannot write takes two minutes to say so
    refuse_if_at_work(workspace.home)
    from flows.refresh import refresh as flow
    from tasks.reporting.progress import reporting_to
    from tasks.workspace.prefect_server import own_server

    with own_server(), reporting_to(tables.live_reporter()):
        outcome = flow(provider, max_usd)

    def show() -> None:
        from tasks.recommendation.publication import after_refresh
        from warehouse.export import published_rows

        firsts = [row for row in published_rows(workspace.published) if row["rank"] == 1]
        rows, sentences = after_refresh(workspace, firsts)
        tables.print_recommendations(rows)
        typer.echo("".join(f"\n{sentence}" for sentence in sentences))

    return Answer(outcome, show)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of `srift recommend`."""

    workload: Annotated[
        str, typer.Argument(help="A name under [workloads] in srift.toml, or of an import.")
    ]
    deadline: Annotated[
        str | None, typer.Option(help="Cheapest within this time: 12h, 90m, 2d; 12 is 12 hours.")
    ] = None
    budget: Annotated[
        float | None, typer.Option(min=0.0, help="Fastest within this many dollars.")
    ] = None
    p_required: Annotated[
        float | None,
        typer.Option(
            help="Probability, such as 0.9, with which it must be met, or nothing is named; if not given, exceeding it"
            " is weighed (overshoot_price in srift.toml)."
        ),
    ] = None
    provider: Annotated[
        str | None,
        typer.Option(
            help="local or ec2; if not given, the one that knows the workload, local before ec2."
        ),
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**15,
            help="Samples, if not those of srift.toml; a must for what is known by imports alone.",
        ),
    ] = None
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=10**9,
            help="Global batch, if not that of srift.toml; a must for what is known by imports alone.",
        ),
    ] = None
    market: Annotated[str, typer.Option(help="any, on-demand or spot.")] = "any"
    instance_type: Annotated[
        str | None, typer.Option("--type", help="Types whose name holds this: g5, xlarge.")
    ] = None
    device: Annotated[
        str | None, typer.Option(help="Types whose device's name holds this: A10G.")
    ] = None
    by_device: Annotated[
        bool, typer.Option("--by-device", help="Also the best of each device alone.")
    ] = False
    top: Annotated[int, typer.Option(min=1, help="How many clusters to show.")] = 5
    pilots: Annotated[
        int,
        typer.Option(
            min=0,
            max=9,
            help="Runs to name, with their price, that would settle the choice; buys nothing.",
        ),
    ] = 3

    @property
    def hours(self) -> float | None:
        """Hours of `12h`, `90m`, `2d` or a bare number of hours. Raises BadParameter on anything else."""
        if self.deadline is None:
            return None
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mhd]?)", self.deadline.strip())
        if match is None or float(match[1]) <= 0:
            raise typer.BadParameter(
                f"deadline {self.deadline!r} is not a time above zero of the form 12h, 90m or 2d"
            )
        return float(match[1]) * {"m": 1 / 60, "h": 1.0, "": 1.0, "d": 24.0}[match[2]]

    def check(self) -> None:
        """Raises BadParameter where it is not one question."""
        if (self.hours is None) == (self.budget is None):
            raise typer.BadParameter("give either --deadline or --budget")
        if self.budget is not None and not math.isfinite(self.budget):
            raise typer.BadParameter(f"budget {self.budget} is no number of dollars")
        if self.p_required is not None and not 0 < self.p_required < 1:
            raise typer.BadParameter(
                f"--p-required {self.p_required:g} is no probability between 0 and 1, such as 0.9"
            )
        _check_market(self.market)


MARKETS = ("any", "on-demand", "spot")


def _check_market(market: str) -> None:
    """Raises BadParameter where there is none called so."""
    if market not in MARKETS:
        near, known = nearest_names(market.lower(), MARKETS), f"known: {', '.join(MARKETS)}"
        raise typer.BadParameter(
            f"unknown market {market!r}; {near if near == known else f'{near} {known}'}"
        )


def _filters(asked: object, *columns: str) -> tuple[tuple[str, str], ...]:
    """The market and `columns` of offers, with what each must hold, where something was asked for."""
    texts = {one: getattr(asked, one) for one in ("market", *columns)}
    return tuple(
        (one, text) for one, text in texts.items() if text and (one, text) != ("market", "any")
    )


@verb()
def recommend(asked: Asked) -> Answer:
    """Ask the model in force now, over the newest prices. That nothing meets the constraint is an answer: exit 0."""
    asked.check()
    from tasks.reporting.progress import working

    with working(f"asking the model in force about {asked.workload}"):
        from tasks.market.offers import OffersWanted
        from tasks.recommendation.ask import Question, answer
        from tasks.reporting.tables import print_recommendations

        provider = asked.provider or _provider_that_knows(asked.workload)
        question = Question(
            workload=asked.workload,
            hours=asked.hours,
            usd=asked.budget,
            p_required=asked.p_required,
            samples=asked.samples,
            batch=asked.batch,
            machines=OffersWanted(filters=_filters(asked, "instance_type", "device")),
        )
        rows = answer(
            provider, question, top=asked.top, pilots=asked.pilots, by_device=asked.by_device
        )
    return Answer(rows, lambda: print_recommendations(rows))


@verb()
def size(
    workload: Annotated[
        str, typer.Argument(help="A workload that was measured, here or by an import.")
    ],
    instance_type: Annotated[
        str | None, typer.Option("--type", help="One instance type; else all measured.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, max=10**9, help="Global batch, if not that of srift.toml.")
    ] = None,
    provider: Annotated[
        str | None,
        typer.Option(
            help="local or ec2; if not given, the one that knows the workload, local before ec2."
        ),
    ] = None,
) -> Answer:
    """How large a cluster is still efficient, what would hide communication, and the best batch, by measured runs."""
    from tasks.recommendation.sizing import SizeQuestion
    from tasks.recommendation.sizing import size as sized
    from tasks.reporting.tables import print_sizing

    asked = SizeQuestion(workload=workload, instance_type=instance_type, batch=batch)
    found = sized(provider or _provider_that_knows(workload), asked)
    return Answer(found, lambda: print_sizing(found))


@verb()
def table(
    workload: Annotated[str | None, typer.Argument(help="One workload; else all.")] = None,
    goal: Annotated[str | None, typer.Option(help="One goal; else all.")] = None,
    provider: Annotated[str | None, typer.Option(help="local or ec2; else both.")] = None,
    top: Annotated[
        int, typer.Option(min=1, help="How many clusters a goal to show; --json has all.")
    ] = 1,
    sort: Annotated[
        str | None,
        typer.Option(help="A column of --json, such as usd; -COLUMN sorts from the largest."),
    ] = None,
) -> Answer:
    """The published table: the first choice for every workload and goal, and with --top its close rivals."""
    from tasks.reporting.tables import print_recommendations
    from warehouse.export import published_rows

    rows = published_rows(_settings().home / "published")
    for column, wanted in (("workload", workload), ("goal", goal), ("provider", provider)):
        known = sorted({str(row[column]) for row in rows})
        if wanted is not None and wanted not in known:
            raise typer.BadParameter(
                f"no row is of {column} {wanted!r}; {nearest_names(wanted, known)}"
            )
        rows = [row for row in rows if wanted in (None, row[column])]
    shown = [row for row in rows if row["rank"] <= top]
    if sort is not None:
        rows, shown = _in_order(rows, sort), _in_order(shown, sort)
    return Answer(rows, lambda: print_recommendations(shown))


def _in_order(rows: list[dict[str, Any]], sort: str) -> list[dict[str, Any]]:
    """By a column, from the largest with a - before it; unknown values last. Raises BadParameter on another name."""
    column = sort.removeprefix("-")
    names = rows[0] if rows else {}
    sortable = [
        name for name in names if not any(isinstance(row[name], (list, dict)) for row in rows)
    ]
    if rows and column not in sortable:
        raise typer.BadParameter(
            f"no column {column!r} to sort by; {nearest_names(column, sortable)}"
        )
    known = [row for row in rows if row[column] is not None]
    known.sort(key=lambda row: row[column], reverse=sort.startswith("-"))
    return known + [row for row in rows if row[column] is None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The options of `srift measure`."""

    workload: Annotated[str, typer.Argument(help="A workload of srift.toml with an entrypoint.")]
    on: Annotated[
        list[str] | None,
        typer.Option(
            help="Machines, as 2xg5.xlarge or 1xa+1xb; may be repeated. Without it: pilots of its goals."
        ),
    ] = None
    max_usd: Annotated[float | None, typer.Option(min=0.0, help="Dollar cap; a must on ec2.")] = (
        None
    )
    provider: Provider = "local"
    pilots: Annotated[
        int, typer.Option(min=1, max=9, help="Without --on: how many pilots at most.")
    ] = 3
    dry_run: Annotated[bool, typer.Option(help="Print what would be bought; start nothing.")] = (
        False
    )


@verb(interrupted="machines released, measurements loaded; the model and the table as they were")
def measure(asked: Named) -> Answer:
    """Measure a workload on named machines now, or its pilots, under the caps of a refresh. Publishes nothing."""
    from tasks.campaign.named import Wish
    from tasks.reporting import tables
    from tasks.workspace.workspace import capabilities, open_workspace, refuse_to_spend

    provider, max_usd = asked.provider, asked.max_usd
    wish = Wish(workload=asked.workload, clusters=tuple(asked.on or ()), pilots=asked.pilots)
    if asked.dry_run and capabilities(provider).spends_money:
        from tasks.campaign.dry_run import as_rows, as_text, dry_run

        plan, cap_usd = dry_run(provider, max_usd, wish)
        return Answer(as_rows(plan), as_text(plan, cap_usd))
    if asked.dry_run:
        from tasks.campaign.named import dry_run as named

        launches = named(provider, wish)
        return Answer(tables.launches_as_rows(launches), lambda: tables.print_launches(launches))
    from tasks.workspace.home import check_home
    from tasks.workspace.locking import refuse_if_at_work

    workspace = open_workspace(provider)
    refuse_to_spend(provider, max_usd)
    check_home(workspace.home)
    refuse_if_at_work(workspace.home)
    from flows.measure import measure_named
    from tasks.providers.base import ProviderError
    from tasks.reporting.progress import reporting_to
    from tasks.workspace.prefect_server import own_server

    with own_server(), reporting_to(tables.live_reporter()):
        outcome = measure_named(wish, provider, max_usd)
    nothing = (
        None
        if any(row["measured"] for row in outcome["runs"])
        else ProviderError("nothing was measured")
    )
    return Answer(outcome, lambda: tables.print_measured(outcome, provider), nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The options of `srift export`."""

    workload: Annotated[str, typer.Argument(help="A workload of the published table.")]
    to: Annotated[str, typer.Option(help="skypilot, sagemaker, karpenter, torchrun or fleet.")]
    goal: Annotated[
        str | None,
        typer.Option(
            help="Which of its goals; with its limit, as `srift table` prints it, where two have one name."
        ),
    ] = None
    rank: Annotated[
        int, typer.Option(min=1, help="Which of the goal's clusters, 1 is the best.")
    ] = 1
    provider: Annotated[
        str | None, typer.Option(help="local or ec2, where both have published the workload.")
    ] = None
    output: Annotated[Path | None, typer.Option(help="A file to write; else it is printed.")] = None


@verb()
def export(asked: Exported) -> Answer:
    """A published recommendation as a file for where people act. Reads the table; starts and buys nothing."""
    from tasks.recommendation.exports.choice import Wanted, choose
    from tasks.recommendation.exports.export import export as exported
    from warehouse.export import published_rows

    rows = published_rows(_settings().home / "published")
    wanted = Wanted(
        workload=asked.workload, goal=asked.goal, provider=asked.provider, rank=asked.rank
    )
    choice = choose(rows, wanted, datetime.now(UTC))
    body, text = exported(choice, asked.to)
    for warning in choice.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if asked.output is None:
        return Answer(body, text)
    asked.output.write_text(f"{text.rstrip()}\n")
    return Answer(body | {"written": str(asked.output)}, f"written: {asked.output}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """The options of `srift offers`."""

    instance_type: Annotated[
        str | None, typer.Argument(help="Types whose name holds this: g5, xlarge.")
    ] = None
    device: Annotated[str | None, typer.Option(help="Whose device's name holds this: A10G.")] = None
    market: Annotated[str, typer.Option(help="any, on-demand or spot.")] = "any"
    region: Annotated[str | None, typer.Option(help="In regions whose name holds this.")] = None
    zone: Annotated[str | None, typer.Option(help="In zones whose name holds this.")] = None
    sort: Annotated[
        str, typer.Option(help="A column of --json; -COLUMN sorts from the largest.")
    ] = "usd_per_hour"
    provider: Provider = "local"


@verb()
def offers(asked: Listed) -> Answer:
    """Instance types with devices, baseline bandwidth, price by market and zone, and spot risk; a line an offer."""
    _check_market(asked.market)
    from tasks.market.offers import COLUMNS, OffersWanted, listed
    from tasks.reporting.tables import print_offers
    from tasks.workspace.workspace import open_workspace

    if asked.sort.removeprefix("-") not in COLUMNS:
        raise typer.BadParameter(
            f"no column {asked.sort!r} to sort by; {nearest_names(asked.sort, COLUMNS)}"
        )
    wanted = OffersWanted(
        filters=_filters(asked, "instance_type", "device", "region", "zone"), sort=asked.sort
    )
    rows = listed(open_workspace(asked.provider), wanted)
    return Answer(rows, lambda: print_offers(rows))


@verb()
def spend(
    by: Annotated[str, typer.Option(help="day, campaign, workload or type.")] = "day",
    days: Annotated[
        int | None, typer.Option(min=1, help="Only what ended within so many days.")
    ] = None,
    provider: Provider = "local",
) -> Answer:
    """Dollars that measuring has cost, and what machines that are held may still cost."""
    from tasks.monitoring.spend import BY, spend_of
    from tasks.reporting.tables import print_spend

    if by not in BY:
        raise typer.BadParameter(f"--by {by!r}: {nearest_names(by, BY)}")
    found = spend_of(provider, by, days=days)
    return Answer(found, lambda: print_spend(found))


@verb("import")
def import_(
    file: Annotated[Path | None, typer.Argument(help="Measurement rows, CSV or Parquet.")] = None,
    workloads: Annotated[
        Path | None,
        typer.Option(
            help="Facts: parameters, gradient_bytes, flops_per_sample ...; with FILE or alone."
        ),
    ] = None,
    provider: Annotated[
        str | None,
        typer.Option(
            help="Whose workloads the facts are of, beside those of FILE: ec2 (default) or local."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print how it is read; load nothing.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Load what looks mistaken: units, speeds beyond a device's peak, misspelt types.",
        ),
    ] = False,
) -> Answer:
    """Load measurements made elsewhere, facts of workloads, or both. Loading the same again changes nothing."""
    if file is None and workloads is None:
        raise typer.BadParameter(
            "give a file of measurements, --workloads with a file of facts, or both"
        )
    from tasks.data_files.imports import ImportFiles, import_measurements
    from tasks.workspace.workspace import capabilities

    if provider is not None:
        capabilities(provider)
    settings, warehouse = _opened()
    if not dry_run:
        warehouse.create()
    imported = import_measurements(
        warehouse,
        ImportFiles(measurements=file, workloads=workloads, provider=provider),
        datetime.now(UTC),
        local_types=settings.local.instance_types,
        force=force,
        dry_run=dry_run,
    )
    return Answer(asdict(imported), imported.as_text())


@verb()
def forget(
    import_id: Annotated[
        str | None,
        typer.Argument(
            help="An import's id, or how it begins; `srift import` prints it, --list too."
        ),
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Print all imports and end.")] = False,
) -> Answer:
    """Undo an import: its rows and facts no longer count. Importing again brings them back; nothing is deleted."""
    if (import_id is None) != list_all:
        raise typer.BadParameter("give either the id of an import or --list")
    from tasks.data_files.imports import forget_import, list_imports
    from tasks.reporting.tables import print_imports

    _, warehouse = _opened()
    if not warehouse.exists():
        found: list[dict[str, Any]] | dict[str, str] = (
            [] if list_all else {"says": "nothing was ever imported"}
        )
        return Answer(found, "nothing was ever imported")
    warehouse.create()
    if import_id is None:
        found = list_imports(warehouse)
        return Answer(found, lambda: print_imports(found))
    forgotten = forget_import(warehouse, import_id, datetime.now(UTC))
    return Answer(asdict(forgotten), forgotten.sentence)


@verb()
def workloads() -> Answer:
    """What is known of each workload: by which provider, on which devices, from how many rows, and its facts."""
    from tasks.recommendation.known_workloads import known_workloads
    from tasks.reporting.tables import print_workloads

    settings, warehouse = _opened()
    known = [one.as_json() for one in known_workloads(warehouse, settings)]
    return Answer(known, lambda: print_workloads(known))


@verb()
def backtest(
    train: Annotated[Path, typer.Argument(help="Measurement rows to fit on, CSV or Parquet.")],
    test: Annotated[Path, typer.Argument(help="Measurement rows to predict, CSV or Parquet.")],
    workloads: Annotated[
        Path | None, typer.Option(help="Facts: parameters, gradient_bytes, flops_per_sample ...")
    ] = None,
    catalogue: Annotated[
        Path | None, typer.Option(help="Instance types: vcpu, gpu_count, network_gbps ...")
    ] = None,
    predictions: Annotated[
        Path | None, typer.Option(help="CSV to write: TEST with what was predicted.")
    ] = None,
) -> Answer:
    """Fit on one file, predict another: errors and interval coverage by workload and cluster size."""
    from tasks.data_files.backtest import backtest as compare
    from tasks.reporting.tables import print_scores

    report = compare(train, test, workloads=workloads, catalogue=catalogue, predictions=predictions)
    return Answer(
        report.as_json(), lambda: print_scores(report.summary, report.headline, report.sentences)
    )


@verb()
def status(provider: Provider = "local") -> Answer:
    """What is running, what it costs, what is stale."""
    from tasks.monitoring.status import status_of
    from tasks.reporting.tables import print_status

    found = status_of(provider)
    return Answer(found, lambda: print_status(found))


@verb()
def reap(
    provider: Annotated[
        str | None, typer.Option(help="local or ec2; else all that were used from here.")
    ] = None,
) -> Answer:
    """End what should be dead, and load what it had measured."""
    from tasks.execution.collect import reap_now
    from tasks.providers.base import NotSwept

    try:
        sentences = reap_now(provider)
    except NotSwept as error:
        return Answer(
            {"ended": error.done, "not_swept": error.unswept}, "\n".join(error.done), error
        )
    return Answer(
        {"ended": sentences, "not_swept": {}}, "\n".join(sentences) or "nothing was left running"
    )


@verb()
def check(
    workload: Annotated[str, typer.Argument(help="A workload of srift.toml with an entrypoint.")],
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which it is ended.")
    ] = 300.0,
) -> Answer:
    """Make two steps of a workload on this machine, and say what is wrong with it. Buys nothing."""
    from tasks.doctor.workload_check import check_workload, problems
    from tasks.reporting.tables import print_check

    found = check_workload(_settings(), workload, timeout_s=timeout)
    return Answer(found, lambda: print_check(found), problems(found))


@verb()
def doctor(
    provider: Provider = "local",
    print_policies: Annotated[
        bool, typer.Option("--print-policies", help="Print IAM policies and end.")
    ] = False,
    share_warehouse: Annotated[
        bool,
        typer.Option(
            "--share-warehouse",
            help="Copy this home's warehouse into the one that [shared] names, and end.",
        ),
    ] = False,
) -> Answer:
    """Check all that a refresh needs, and say how to put right what is wrong. Starts nothing, costs nothing."""
    from tasks.doctor import findings
    from tasks.doctor import report as checks

    settings = _settings()
    if print_policies:
        policies = checks.policies_of(settings)
        return Answer(policies, json.dumps(policies, indent=2))
    if share_warehouse:
        said = checks.share_warehouse(settings)
        return Answer({"says": said}, said)
    found = checks.examine(settings, provider)
    return Answer(
        findings.as_json(found),
        findings.as_text(found),
        None if findings.well(found) else SystemExit(1),
    )


@verb()
def restore() -> Answer:
    """Replace a damaged warehouse by the copy that the last refresh made. The damaged file is kept."""
    from tasks.doctor.report import restore_warehouse

    said = restore_warehouse(_settings())
    return Answer({"says": said}, said)


def _provider_that_knows(workload: str) -> str:
    """Whom to ask about a workload where nobody says; a note says so where it is not the obvious one."""
    from tasks.recommendation.known_workloads import provider_that_knows

    settings, warehouse = _opened()
    provider, why = provider_that_knows(warehouse, settings, workload)
    if why:
        typer.echo(f"note: {why}", err=True)
    return provider


def _settings() -> Settings:
    """Imported late, as all that `--help` does not take."""
    from tasks.workspace.settings import load_settings

    return load_settings()


def _opened() -> tuple[Settings, Warehouse]:
    """The settings, and the warehouse of their home, which may not be there yet."""
    from tasks.workspace.shared import open_warehouse

    settings = _settings()
    return settings, open_warehouse(settings)


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
    from tasks.workspace.settings import SettingsError

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
        bare = (
            getattr(error, "errno", None) is not None
        )  # of the system, without a sentence of ours
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
    """Errors whose text says all; looked up when there is one, since what raises them takes long to import."""
    from tasks.data_files.measurements import ImportRefused
    from tasks.doctor.workload_check import CheckFailed
    from tasks.providers.base import ProviderError
    from tasks.recommendation.exports.choice import ExportRefused
    from tasks.workspace.locking import Busy
    from warehouse.database import WarehouseError

    cancelled = getattr(
        sys.modules.get("prefect.exceptions"), "CancelledRun", Busy
    )  # a refresh that came second
    return (
        ProviderError,
        WarehouseError,
        Busy,
        ImportRefused,
        CheckFailed,
        ExportRefused,
        OSError,
        cancelled,
    )


_FULL_DISK = (
    "database or disk is full",
    "No space left on device",
    "Disk quota exceeded",
)  # SQLite, the system


def _of_the_disk(error: BaseException) -> str | None:
    """What a full or read-only disk has to do with an error of whichever library, in a sentence; None: nothing."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or (
            None if following.__suppress_context__ else following.__context__
        )
    for one in chain:
        number, said = getattr(one, "errno", None), str(one).partition("\n")[0]
        if number in (errno.ENOSPC, errno.EDQUOT) or any(word in said for word in _FULL_DISK):
            return f"the disk is full: {said}. What was stored before stays; free some space and try again"
        if number == errno.EROFS or "readonly database" in said:
            return f"{said}: make it writable, or set SRIFT_HOME to a folder that is"
    if type(error).__module__.partition(".")[0] in (
        "prefect",
        "httpx",
    ):  # a server says no more than "error 500"
        from tasks.providers.base import ProviderError
        from tasks.workspace.home import check_home

        try:
            check_home(_settings().home)
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
    settings = _settings()
    home = settings.home
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings.set_server_variables()
    os.environ.setdefault("PREFECT_HOME", str(home / "prefect"))
    os.environ.setdefault(
        "PREFECT_LOGGING_LEVEL", "CRITICAL"
    )  # it would print the traceback of every error first
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


def _json_value(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
