"""What does a campaign cost until its choices are good: ours, random order, a full sweep, Bayesian optimisation.

`python -m flows.bench_campaign FILE --workloads FACTS --catalogue CATALOGUE`, or with `--warehouse warehouse.duckdb`,
holds each workload out in turn and prints the dollars until mean regret is, and stays, at most 5 %.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli import explained
from tasks.printing import print_frame
from tasks.replays import compare, dollars, ends, grid, of_file, of_warehouse, plot, regrets


def bench_campaign(
    file: Annotated[Path | None, typer.Argument(help="Measurement rows of EC2, CSV or Parquet.")] = None,
    workloads: Annotated[Path | None, typer.Option(help="Facts: parameters, gradient_bytes.")] = None,
    catalogue: Annotated[Path | None, typer.Option(help="Instance types with list prices.")] = None,
    warehouse: Annotated[
        Path | None, typer.Option(help="Instead of FILE: a warehouse of local runs; only read.")
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Global batches a workload.")] = 6,
    least: Annotated[int, typer.Option(min=2, help="Fewest setups of a global batch.")] = 6,
    hard: Annotated[
        bool, typer.Option(help="Nothing of the workload is known: one device must be bought too.")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    seed: int = 2026,
    percent: Annotated[float, typer.Option(min=0)] = 5.0,
    out: Annotated[Path | None, typer.Option(help="Where to write every curve, CSV; the plot lands beside it.")] = None,
) -> None:
    """Every policy on every workload; nothing is chosen by what comes out."""
    if warehouse is not None:
        scene = of_warehouse(warehouse)
    elif file is not None and catalogue is not None:
        scene = of_file(file, workloads=workloads, catalogue=catalogue)
    else:
        raise typer.BadParameter("give FILE and --catalogue, or --warehouse")
    curves = compare(
        scene,
        batches=batches,
        least=least,
        given=not hard,
        seeds=seeds,
        seed=seed,
        say=lambda text: typer.echo(f"  {text}", err=True),
    )
    begun = "nothing known" if hard else "one device known"
    print_frame(dollars(curves, percent / 100), f"dollars until regret stays at most {percent:g} %, {begun}")
    print_frame(regrets(curves, grid(curves)), "mean regret by dollars spent on a workload, per cent")
    print_frame(ends(curves), "where ours stops by itself")
    if out is not None:
        curves.to_csv(out, index=False)
        plot(curves, out.with_suffix(".png"), title=f"regret against dollars, {begun}")


if __name__ == "__main__":
    with explained():
        typer.run(bench_campaign)
