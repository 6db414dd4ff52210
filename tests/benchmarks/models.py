"""How good are the models on real rows that they have not seen: `tests.benchmarks.splits`, beside two rivals.

`python -m tests.benchmarks.models FILE --workloads FACTS --catalogue CATALOGUE` prints the noise floor of the rows,
errors by split and model, the coverage of the intervals by held-out group, and how good choices by the model are.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from flows.cli import explained
from models.domain.cluster import parse_numbers
from models.domain.workload import joined
from models.step_time.dataset import TrainingData
from models.step_time.model import fit
from tasks.data_files.backtest import read_training
from tasks.data_files.catalogue import read_prices
from tasks.reporting.tables import print_frame
from tasks.training.registry import Provenance, load_served, log_challenger, promote
from tasks.workspace.blas_threads import one_thread
from tasks.workspace.parallel import side_by_side
from tests.benchmarks.choice_scores import contests, scores
from tests.benchmarks.noise import neighbours, placements
from tests.benchmarks.rivals import predict_textbook, predict_trees_alone
from tests.benchmarks.splits import ask, coverage, errors, splits

_MANY, _LARGE = 10_000, 100_000
CHOICES, SPEEDS = "choices", "speeds"


def speeds(data: TrainingData, *, repeats: int, seed: int, large: int = _LARGE) -> pd.DataFrame:
    """Columns what, rows, median_s, most_s over `repeats`: fits, and through MLflow one prediction and 10,000.

    Each of the 10,000 is a row of the data, again and again where there are fewer. Fits use one thread, as retraining
    does; predictions too, and as many as there are cores, as a program that pulls the model does unless it sets that.
    Nothing is left behind.
    """
    setups = data.runs.drop(
        columns=["step_s", "sync_s", "step_spread"], errors="ignore"
    ).reset_index(drop=True)
    many = setups.iloc[np.resize(np.arange(len(setups)), _MANY)].reset_index(drop=True)
    with one_thread():
        model = fit(data, seed=seed)
        found = [("fit", len(data.runs), _timed(lambda: fit(data, seed=seed), repeats))]
        grown = replace(data, runs=_grown(data.runs, large, seed=seed))
        found.append(("fit", large, _timed(lambda: fit(grown, seed=seed), 1)))
    with tempfile.TemporaryDirectory(prefix="srift-speed-") as folder:
        provenance = Provenance(
            training_digest="speed",
            training_rows=len(data.runs),
            code_commit="",
            seed=seed,
            refresh_id="speed",
        )
        version = log_challenger(
            Path(folder),
            model.provider,
            model,
            scoreboard=pd.DataFrame(),
            card="speed",
            provenance=provenance,
        )
        promote(Path(folder), model.provider, version, "to be asked")
        served = load_served(Path(folder), model.provider)
        for what, asked in (("one prediction", setups.iloc[:1]), ("predictions", many)):
            served.predict(asked)
            with one_thread():
                found.append((what, len(asked), _timed(partial(served.predict, asked), repeats)))
        cores = len(os.sched_getaffinity(0))
        title = f"predictions, {cores} threads"
        found.append((title, len(many), _timed(partial(served.predict, many), repeats)))
    rows = [
        (what, count, float(np.median(seconds)), max(seconds)) for what, count, seconds in found
    ]
    return pd.DataFrame(rows, columns=["what", "rows", "median_s", "most_s"])


def _grown(runs: pd.DataFrame, many: int, *, seed: int) -> pd.DataFrame:
    """`many` rows: each again and again with a few samples a device more and a step longer by as much and by noise."""
    copies = runs.iloc[np.resize(np.arange(len(runs)), many)].reset_index(drop=True)
    more = np.arange(many) // max(len(runs), 1)
    parsed = [
        parse_numbers(str(one), 1 + str(one).count("+"), "batch_per_device")
        for one in copies["batch_per_device"]
    ]
    batches = [
        joined(tuple(one + extra for one in own))
        for own, extra in zip(parsed, more.tolist(), strict=True)
    ]
    noise = np.exp(np.random.default_rng(seed).normal(0, 0.03, many))
    longer = copies["step_s"].to_numpy(float) * (1 + 0.01 * more) * noise
    return copies.assign(
        batch_per_device=batches, step_s=longer, run_id=[f"grown-{at}" for at in range(many)]
    )


def _timed(work: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        before = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - before)
    return seconds


RIVALS = {"textbook": predict_textbook, "trees": predict_trees_alone}


def bench_models(
    file: Annotated[Path, typer.Argument(help="Measurement rows, CSV or Parquet.")],
    workloads: Annotated[
        Path | None, typer.Option(help="Facts: parameters, gradient_bytes.")
    ] = None,
    catalogue: Annotated[
        Path | None, typer.Option(help="Instance types: devices, vCPUs, network.")
    ] = None,
    seed: int = 2026,
    only: Annotated[
        str,
        typer.Option(
            help="A split by its name, such as 'larger clusters', or 'choices', or 'speeds'."
        ),
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Where to write every prediction, CSV.")] = None,
) -> None:
    """Every split, ours and the rivals'; nothing is chosen by what comes out."""
    data, devices = read_training(file, workloads=workloads, catalogue=catalogue)
    print_frame(
        placements(data.runs), "noise floor: rows that differ only in the order of their machines"
    )
    print_frame(neighbours(data.runs), "noise floor: rows against their neighbours in batch")
    prices = read_prices(catalogue) if catalogue is not None else {}
    chosen = [one for one in splits(data.runs, devices, seed=seed) if only in ("", one.name)]
    if not chosen and only not in (CHOICES, SPEEDS):
        raise typer.BadParameter(f"no split is called {only!r}")
    if chosen:
        with one_thread():
            scored = pd.concat(
                side_by_side(
                    partial(ask, data, rivals=RIVALS, devices=devices, seed=seed, usd=prices),
                    chosen,
                )
            )
        if out is not None:
            scored.to_csv(out, index_label="row")
        print_frame(errors(scored, ["ours", *RIVALS]), "per cent of the measured step time")
        print_frame(coverage(scored, ["split"]), "intervals by split, per cent")
        print_frame(coverage(scored, ["split", "group"]), "intervals by held-out group, per cent")
    if only in ("", SPEEDS):
        print_frame(
            speeds(data, repeats=3, seed=seed), "seconds; predictions through the registered model"
        )
    for pilots in (0, 3) if only in ("", CHOICES) else ():
        found = [one for _, _, one in contests(data, devices, prices, pilots=pilots, seed=seed)]
        for what, table in scores(found, seed=seed) if found else ():
            asked = f"choices at {len(found)} global batches, each workload held out, {pilots} recommended pilots"
            print_frame(table, f"{asked}: {what}")


if __name__ == "__main__":
    with explained():
        typer.run(bench_models)
