"""How long planning takes at EC2's scale, in a made-up market of ten GPU types and up to 64 machines.

`python -m flows.bench_planner` prints the candidates, how many were left at each stage and the seconds; with `--plot
FILE.png` also how time grows with types and machines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from flows.cli import explained
from tasks import imagined
from tasks.planning_times import growth, plot, timed
from tasks.printing import print_frame


def bench_planner(
    repeats: Annotated[int, typer.Option(min=1, help="Runs after one to warm up; the median counts.")] = 5,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="PNG to write: growth by types and machines.")] = None,
) -> None:
    """Ten types, 64 machines, mixes of up to three types, both markets, four goals; then smaller markets."""
    model = imagined.champion(imagined.types())
    names = (imagined.BY_ROWS, imagined.PROFILED)
    whole = [timed(model, name, types=10, max_hosts=64, repeats=repeats) for name in names]
    print_frame(pd.DataFrame(whole), "ten types, up to 64 machines, on-demand and spot, four goals")
    if plot_to is not None:
        grown = growth(model, imagined.BY_ROWS)
        print_frame(grown.drop(columns="workload"), "growth with types and machines")
        plot(grown, plot_to)


if __name__ == "__main__":
    with explained():
        typer.run(bench_planner)
