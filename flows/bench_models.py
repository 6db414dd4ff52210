"""How good are the models on real rows that they have not seen: `models.judging.splits`, beside three rivals.

`python -m flows.bench_models FILE --workloads FACTS --catalogue CATALOGUE` prints the noise floor of the rows, errors
by split and model, the coverage of the intervals by held-out group, and how good choices by the model are.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from flows.cli import explained
from models.judging.benchmark import ask, coverage, errors
from models.judging.choice import judge, summary
from models.judging.contests import contests
from models.judging.noise import neighbours, placements
from models.judging.splits import splits
from models.judging.textbook import predict_textbook
from tasks.adaptdl_fit import predict_adaptdl
from tasks.backtest import read_training
from tasks.catalogue import read_prices
from tasks.printing import print_frame
from tasks.side_by_side import side_by_side
from tasks.speed import speeds
from tasks.threads import one_thread
from tasks.trees import predict_trees_alone

RIVALS = {"textbook": predict_textbook, "trees": predict_trees_alone, "adaptdl": predict_adaptdl}


def bench_models(
    file: Annotated[Path, typer.Argument(help="Measurement rows, CSV or Parquet.")],
    workloads: Annotated[Path | None, typer.Option(help="Facts: parameters, gradient_bytes.")] = None,
    catalogue: Annotated[Path | None, typer.Option(help="Instance types: devices, vCPUs, network.")] = None,
    seed: int = 2026,
    only: Annotated[str, typer.Option(help="A split by its name, such as 'larger clusters'.")] = "",
    out: Annotated[Path | None, typer.Option(help="Where to write every prediction, CSV.")] = None,
) -> None:
    """Every split, ours and the rivals'; nothing is chosen by what comes out."""
    data, devices = read_training(file, workloads=workloads, catalogue=catalogue)
    print_frame(placements(data.runs), "noise floor: rows that differ only in the order of their machines")
    print_frame(neighbours(data.runs), "noise floor: rows against their neighbours in batch")
    chosen = [one for one in splits(data.runs, devices, seed=seed) if only in ("", one.name)]
    if not chosen:
        raise typer.BadParameter(f"no split is called {only!r}")
    with one_thread():
        scored = pd.concat(side_by_side(partial(ask, data, rivals=RIVALS, devices=devices, seed=seed), chosen))
    if out is not None:
        scored.to_csv(out, index_label="row")
    print_frame(errors(scored, ["ours", *RIVALS]), "per cent of the measured step time")
    print_frame(coverage(scored, ["split"]), "intervals by split, per cent")
    print_frame(coverage(scored, ["split", "group"]), "intervals by held-out group, per cent")
    prices = read_prices(catalogue) if catalogue is not None else {}
    if only == "":
        print_frame(speeds(data, repeats=3, seed=seed), "seconds; predictions through the registered model")
    for pilots in (0, 3) if only == "" else ():
        found = [judge(one, seed=seed) for _, _, one in contests(data, devices, prices, pilots=pilots, seed=seed)]
        if found:
            title = f"choices at {len(found)} global batches, each workload held out, {pilots} pilots; per cent"
            print_frame(summary(pd.concat(found)), title)


if __name__ == "__main__":
    with explained():
        typer.run(bench_models)
