"""Define the commands that work on measurement files: import, forget, backtest."""

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.common import DryRun, Json, settings, show

app = typer.Typer()
Facts = Annotated[
    Path | None, typer.Option(help="File of workload facts: parameters, gradient_bytes ...")
]


@app.command("import")
def import_(
    file: Annotated[
        Path | None, typer.Argument(help="CSV or Parquet file of measurements.")
    ] = None,
    workloads: Facts = None,
    dry_run: DryRun = False,
    force: Annotated[
        bool, typer.Option("--force", help="Load even if units, types or speeds look wrong.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Load a file of measurements, a file of workload facts, or both."""
    if file is None and workloads is None:
        raise typer.BadParameter(
            "give FILE (measurements), --workloads FILE (facts of workloads), or both"
        )
    from tasks.data_files.imports import import_measurements
    from tasks.workspace.shared import open_warehouse

    found = settings()
    warehouse = open_warehouse(found)
    if not dry_run:
        warehouse.create()
    imported = import_measurements(
        warehouse,
        datetime.now(UTC),
        measurements=file,
        workloads=workloads,
        local_types=found.local.instance_types,
        force=force,
        dry_run=dry_run,
    )
    show(as_json, asdict(imported), imported.as_text())


@app.command()
def forget(
    import_id: Annotated[
        str | None, typer.Argument(help="Id of an import, or the start of the id. See --list.")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Print all imports.")] = False,
    as_json: Json = False,
) -> None:
    """Stop using the rows of an import. Importing the same file again restores the rows."""
    if (import_id is None) != list_all:
        raise typer.BadParameter("give either the id of an import or --list")
    from tasks.data_files.imports import forget_import, list_imports
    from tasks.reporting.tables import print_imports
    from tasks.workspace.shared import open_warehouse

    warehouse = open_warehouse(settings())
    warehouse.create()
    if import_id is None:
        show(as_json, list_imports(warehouse), print_imports)
        return
    forgotten = forget_import(warehouse, import_id, datetime.now(UTC))
    show(as_json, forgotten, forgotten["sentence"])


@app.command()
def backtest(
    train: Annotated[Path, typer.Argument(help="CSV or Parquet file of measurements to fit.")],
    test: Annotated[Path, typer.Argument(help="CSV or Parquet file of measurements to predict.")],
    workloads: Facts = None,
    catalogue: Annotated[
        Path | None, typer.Option(help="File of instance types: vcpu, gpu_count ...")
    ] = None,
    predictions: Annotated[
        Path | None, typer.Option(help="CSV file to write: the rows of TEST with predictions.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit a model on TRAIN, predict TEST, and print the errors by workload and cluster size."""
    from tasks.data_files.backtest import backtest as compare
    from tasks.reporting.tables import print_backtest

    settings()
    found = compare(train, test, workloads=workloads, catalogue=catalogue, predictions=predictions)
    show(as_json, found, print_backtest)
