"""Define the commands recommend, size, table, export, offers and workloads."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.common import Json, Provider, ProviderName, settings, show

app = typer.Typer()
Market = Annotated[
    Literal["on-demand", "spot"] | None, typer.Option(help="Only this market. Default: both.")
]
Batch = Annotated[
    int | None,
    typer.Option(min=1, max=10**9, help="Global batch size. Default: as in srift.toml."),
]


def duration(text: str) -> float:
    """Return the hours of a deadline such as `12h`, `90m` or `2d`. A plain number means hours."""
    return _quantity(text, {"m": 1 / 60, "": 1.0, "h": 1.0, "d": 24.0}, "12h, 90m or 2d")


def count(text: str) -> float:
    """Return the number that a text such as `300M`, `20B` or `1.5T` means."""
    units = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    return _quantity(text, units, "300M, 20B or 1.5T")


def dollars(text: str) -> float:
    return _quantity(text, {"": 1.0}, "100 or 99.50")


def _quantity(text: str, units: Mapping[str, float], form: str) -> float:
    """Return the number at the start of `text`, multiplied by the value of its unit in `units`.

    form: examples of valid texts, for the error message.
    Raises BadParameter if the text is not a number with a unit of `units`, or if the result is
    outside (0, 1e18].
    """
    match = re.fullmatch(r"(\d*\.?\d+)\s*([a-z]?)", text.strip().lower())
    found = float(match[1]) * units.get(match[2], 0.0) if match else 0.0
    if not 0 < found <= 1e18:
        raise typer.BadParameter(f"{text!r} is not of the form {form}")
    return found


def _shape(path: Path, sequence: int | None) -> dict[str, float]:
    """Return facts of a transformer, such as its FLOPs per sample.

    path: the transformer's Hugging Face `config.json`.
    sequence: the number of tokens per sample; None means the model's maximum.
    Raises BadParameter if the file cannot be used.
    """
    from tasks.workspace.settings import read_transformer

    try:
        return read_transformer(str(path), sequence, Path())
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"--transformer {path}: {error}") from None


def _filters(**texts: str | None) -> list[tuple[str, str]]:
    """Return the filters that the user gave, as (column, text) pairs.

    texts: {column: text}. A text that is None or empty means no filter.
    """
    return [(column, text) for column, text in texts.items() if text]


@app.command("recommend", help="Recommend clusters for a workload at current prices.")
@dataclass
class Recommend:
    """The options of `srift recommend`. typer calls this class like a function."""

    workload: Annotated[
        str, typer.Argument(help="A workload of srift.toml, an import or the public data.")
    ] = ""
    deadline: Annotated[
        float | None,
        typer.Option(
            parser=duration, help="Find the cheapest cluster within this time: 12h, 90m or 2d."
        ),
    ] = None
    budget: Annotated[
        float | None,
        typer.Option(
            parser=dollars, help="Find the fastest cluster for at most this many dollars."
        ),
    ] = None
    p_required: Annotated[
        float | None,
        typer.Option(help="Required probability of meeting the deadline or budget, such as 0.9."),
    ] = None
    provider: Provider = "local"
    samples: Annotated[
        int | None,
        typer.Option(min=1, max=10**15, help="Samples to train on. Default: as in srift.toml."),
    ] = None
    transformer: Annotated[
        Path | None, typer.Option(help="Hugging Face config.json, in place of a workload.")
    ] = None
    sequence: Annotated[
        int | None, typer.Option(min=1, help="Tokens per sequence. Default: the model's maximum.")
    ] = None
    tokens: Annotated[
        float | None,
        typer.Option(parser=count, help="Tokens to train on, such as 300M, 20B or 1.5T."),
    ] = None
    batch: Batch = None
    market: Market = None
    instance_type: Annotated[
        str | None,
        typer.Option("--type", help="Only instance types whose name contains this text: g5."),
    ] = None
    by_gpu: Annotated[
        bool, typer.Option("--by-gpu", help="Compare the best cluster of each kind of GPU.")
    ] = False
    top: Annotated[int, typer.Option(min=1, help="Maximum number of clusters to show.")] = 5
    pilots: Annotated[
        int, typer.Option(min=0, max=9, help="Maximum number of measurements to suggest.")
    ] = 3
    as_json: Json = False

    def __post_init__(self) -> None:
        if (self.deadline is None) == (self.budget is None):
            raise typer.BadParameter("give either --deadline or --budget")
        if self.p_required is not None and not 0 < self.p_required < 1:
            raise typer.BadParameter("--p-required must be between 0 and 1, such as 0.9")
        if bool(self.workload) == bool(self.transformer):
            raise typer.BadParameter("give either a workload or --transformer")
        if self.sequence and not self.transformer:
            raise typer.BadParameter("--sequence needs --transformer")
        if self.tokens and self.samples:
            raise typer.BadParameter("give --tokens or --samples, but not both")
        shape = _shape(self.transformer, self.sequence) if self.transformer else None
        settings()
        from models.domain.workload import GOALS, Goal
        from tasks.recommendation.answer import Question, answer
        from tasks.reporting.tables import print_recommendations

        name = GOALS[0] if self.budget is None else GOALS[1]
        question = Question(
            workload=f"transformer-{shape['parameters'] / 1e9:.3g}b" if shape else self.workload,
            goal=Goal(goal=name, hours=self.deadline, usd=self.budget, p_required=self.p_required),
            samples=self.samples,
            tokens=self.tokens,
            batch=self.batch,
            transformer=shape,
            by_gpu=self.by_gpu,
            filters=_filters(market=self.market, instance_type=self.instance_type),
        )
        rows = answer(self.provider, question, top=self.top, pilots=self.pilots)
        show(self.as_json, rows, print_recommendations)


@app.command()
def size(
    workload: Annotated[str, typer.Argument(help="A workload with measurements.")],
    instance_type: Annotated[
        str | None, typer.Option("--type", help="Only this instance type. Default: all measured.")
    ] = None,
    batch: Batch = None,
    provider: Provider = "local",
    as_json: Json = False,
) -> None:
    """Show the largest cluster with good scaling, its bandwidth needs, and the best batch size."""
    from tasks.recommendation.sizing import size as sized
    from tasks.reporting.tables import print_sizing

    settings()
    found = sized(provider, workload, instance_type=instance_type, batch=batch)
    show(as_json, found, print_sizing)


@app.command()
def table(
    workload: Annotated[str | None, typer.Argument(help="Workload to show. Default: all.")] = None,
    goal: Annotated[str | None, typer.Option(help="Goal to show. Default: all.")] = None,
    provider: Annotated[
        ProviderName | None, typer.Option(help="Provider to show. Default: both.")
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, help="Clusters to print per goal. --json prints all.")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Print the published table: the best clusters for each workload and goal."""
    from tasks.recommendation.row_filter import rows_with
    from tasks.reporting.tables import print_recommendations
    from warehouse.export import published_rows

    published = published_rows(settings().home / "published")
    rows = rows_with(published, workload=workload, goal=goal, provider=provider)
    show(as_json, rows, lambda rows: print_recommendations([r for r in rows if r["rank"] <= top]))


@app.command()
def export(
    workload: Annotated[str, typer.Argument(help="A workload of the published table.")],
    to: Annotated[
        Literal["skypilot", "sagemaker", "karpenter", "torchrun", "fleet"],
        typer.Option(help="The tool for which to write the file."),
    ],
    goal: Annotated[
        str | None,
        typer.Option(help="Goal and limit, as in `srift table`. Default: the only goal."),
    ] = None,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the cluster for the goal.")] = 1,
    provider: Annotated[
        ProviderName | None, typer.Option(help="Needed if both providers have the workload.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="File to write. Default: print.")] = None,
    as_json: Json = False,
) -> None:
    """Convert a published recommendation to a file for another tool, such as SkyPilot."""
    if output is not None and not output.parent.is_dir():
        raise typer.BadParameter(
            f"folder {output.parent} of --output does not exist. Run `mkdir -p {output.parent}`"
        )
    from tasks.recommendation import exports
    from tasks.recommendation.exports.selection import only_goal, select
    from warehouse.export import published_rows

    found = settings()
    if goal is None and workload in found.workloads:
        goal = only_goal(found.workloads[workload].goals)
    rows = published_rows(found.home / "published")
    selection = select(rows, workload, datetime.now(UTC), goal=goal, provider=provider, rank=rank)
    body, text = exports.export(selection, to)
    for warning in selection.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if output is not None:
        output.write_text(f"{text.rstrip()}\n")
        text = f"written: {output}"
    show(as_json, body, text)


@app.command()
def offers(
    instance_type: Annotated[
        str | None, typer.Argument(help="Only instance types whose name contains this text: g5.")
    ] = None,
    market: Market = None,
    provider: Provider = "local",
    as_json: Json = False,
) -> None:
    """List instance types with devices, bandwidth, prices and spot risk, cheapest first."""
    from tasks.market.offers import list_offers
    from tasks.reporting.tables import print_offers
    from tasks.workspace.workspace import open_workspace

    settings()
    wanted = _filters(market=market, instance_type=instance_type)
    show(as_json, list_offers(open_workspace(provider), wanted), print_offers)


@app.command()
def workloads(as_json: Json = False) -> None:
    """List the known workloads with their providers, devices, facts, and number of step times."""
    from tasks.data_files.imports import load_public
    from tasks.data_files.public import PROVIDER
    from tasks.recommendation.known_workloads import known_workloads
    from tasks.reporting.tables import print_workloads
    from tasks.workspace.workspace import open_workspace

    found, workspace = settings(), open_workspace(PROVIDER)
    load_public(workspace)
    show(as_json, known_workloads(workspace.warehouse, found), print_workloads)
