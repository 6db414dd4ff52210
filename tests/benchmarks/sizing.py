"""Is the efficiency of a larger cluster predicted from one and two? By what `srift size` ships, on measured runs.

`python -m tests.benchmarks.sizing` predicts 4 and 8 machines, or devices of one machine, of every global batch of the
rows in ../shared/data that is known on one unit, on two, and on 4 or 8. Steps of more than two are held out; then all
from the size asked for on. Errors are in points of efficiency: predicted less measured, each 100 T(1) / (G T(G)).

    rule      (1 + R) / (1 + G R), as Zou et al. have it
    shares    what `srift size` answers with: one unit's seconds of the share, and what two took beyond theirs, growing
              as an all-reduce in a ring: by (G - 1) / G
    flat      as shares, with what they took beyond the same at every size

`--hosts` (root, a quiet machine, about 10 minutes a repeat) measures four workloads on 1, 2, 4 and 8 local hosts, at
two bandwidths, and judges these; `--home` keeps what was measured: what is there is not measured again. Efficiencies of
one run each differ by 4.5 points from one hour to another, so take several `--repeats`. Exits 1 where less than nine of
ten predictions by shares are within 5 points.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

from flows.cli import explained
from models.campaign.campaign import Launch
from models.planner.sizing import Series, Work, efficiencies, extra_seconds, series_of
from models.step_time.dataset import TrainingData, at_nominal_speed, by_variant
from tasks.market.offers import note_definitions, snapshot_offers
from tasks.reporting.progress import reporting_to
from tasks.reporting.tables import live_reporter, print_frame
from tasks.workspace.workspace import Workspace, new_refresh_id, open_workspace
from tests.benchmarks.commands import ROOT
from tests.benchmarks.held_out import DATA, Bench
from tests.benchmarks.input_wait import cluster_of
from tests.benchmarks.ranks import WORKLOADS
from tests.benchmarks.trial import Unseen, launch_of, measure_all
from warehouse.reads import training_frames

ASKED, KNOWN = (4, 8), (1, 2)
WITHIN, LEAST_SHARE = 5.0, 0.9
HOSTS = (1, 2, 4, 8)
GLOBAL_BATCHES = {"residual_cnn": 48, "transformer_lm": 24, "wide_mlp": 384, "recommender": 768}
MBITS = (200, 1000)
RULES = ("rule", "shares", "flat")
LEFT = ("more than two", "the size and above")  # what is held out


def predictions(series: Series) -> Iterator[dict[str, object]]:
    """A row a size asked for, work and what is held out: efficiencies, measured and predicted.

    Works are global batches as they were measured, and of those in micro-steps the ones with a single one at the size.
    """
    for size in ASKED:
        asked = {size * micro: micro for micro, steps in series.steps.get(size, {}) if steps == 1}
        works = [*(Work(batch) for batch in series.batches), *(Work(*one) for one in asked.items())]
        for work in works:
            steps = series.sizes(work)
            if not {*KNOWN, size} <= steps.keys():
                continue
            for left, known in zip(
                LEFT, (KNOWN, [one for one in steps if one < size]), strict=True
            ):
                rule, shares = efficiencies(series, work, known, size)
                yield {
                    "workload": series.workload,
                    "type": series.instance_type,
                    "of": f"machines of {series.devices_each}"
                    if series.devices_each
                    else "devices",
                    "size": size,
                    "batch": work.batch,
                    "as": "measured" if work.micro_batch is None else "micro-steps",
                    "held_out": left,
                    "measured": 100 * steps[1].seconds / (size * steps[size].seconds),
                    "rule": None if rule is None else 100 * rule,
                    "shares": None if shares is None else 100 * shares,
                    "flat": flat(series, work, max(known), size),
                }


def flat(series: Series, work: Work, known: int, size: int) -> float | None:
    """Efficiency by shares in per cent, if `size` units took as much beyond their share as `known` ones do."""
    one, extra, share = (
        series.step(1, work),
        extra_seconds(series, work, known),
        series.share(size, work),
    )
    if one is None or extra is None or share is None:
        return None
    return 100 * one.seconds / (size * (share + extra))


def judged(data: TrainingData) -> pd.DataFrame:
    """`predictions` of every workload of the data."""
    data = by_variant(at_nominal_speed(data))
    devices = {
        str(one["name"]): int(one["devices"]) for one in data.instance_types.to_dict("records")
    }
    names = sorted(set(data.runs["workload"].astype(str)))
    return pd.DataFrame(
        [
            row
            for name in names
            for series in series_of(data, name, devices)
            for row in predictions(series)
        ]
    )


def scores(table: pd.DataFrame) -> pd.DataFrame:
    """Mean and median of the errors, and the share within 5 points, by rule, of the cells that all rules answer."""
    rows = []
    answered = table[table[[*RULES]].notna().all(axis=1)]

    def add(label: str, own: pd.DataFrame) -> None:
        for rule in RULES:
            away = (own[rule].astype(float) - own["measured"]).to_numpy(float)
            figures = {
                "mean": np.abs(away).mean(),
                "median": np.median(np.abs(away)),
                "bias": away.mean(),
            }
            within = 100 * np.mean(np.abs(away) <= WITHIN)
            rows.append(
                {"cells": label, "by": rule, "number": len(own), "within_5_%": within, **figures}
            )

    for left in answered["held_out"].unique():
        own = answered[answered["held_out"] == left]
        add(f"all, {left} held out", own)
        for by in ("as", "size", "of", "type", "workload"):
            for name, cells in own.groupby(by):
                add(f"  {by} {name}, {left}", cells)
    return pd.DataFrame(rows)


def settings() -> str:
    """srift.toml of four workloads, and of a type of local host a bandwidth, of which eight go on two cores."""
    text = ""
    for mbit in MBITS:
        text += (
            f"[local.instance_types.b{mbit}]\ncores = 0.2\nmemory_gib = 2.0\nbandwidth_gbps = {mbit / 1000}\n"
            "usd_per_hour = 0.03\nspot_usd_per_hour = 0.01\nspot_interruptions_per_hour = 0.1\n\n"
        )
    for name, batch in GLOBAL_BATCHES.items():
        text += (
            f'[workloads.{name}]\nentrypoint = "{name}.py:build"\nsamples = 100000\nglobal_batch = {batch}\n'
            'goals = [{ goal = "cheapest" }]\n\n'
        )
    return text


def wanted(here: Workspace, repeats: int) -> Iterator[Launch]:
    """A launch a type and workload of what was measured fewer times: the global batch on all sizes, shares on one."""
    runs = training_frames(here.warehouse, "local")["runs"]
    for mbit, (name, batch) in ((mbit, one) for mbit in MBITS for one in GLOBAL_BATCHES.items()):
        cluster = cluster_of(here, f"{HOSTS[-1]}xb{mbit}")
        setups = [(size, batch // size) for size in HOSTS] + [
            (1, batch // size) for size in HOSTS[1:]
        ]
        known = runs[runs["workload"] == name] if len(runs) else runs
        pairs = (
            zip(known["cluster"], known["batch_per_device"].astype(str), strict=True)
            if len(known)
            else ()
        )
        done = Counter((str(ran), share) for ran, share in pairs)
        items = [
            Unseen(workload=name, nodes=tuple(range(size)), batches=(share,) * size)
            for size, share in setups
            if done[f"{size}xb{mbit}", str(share)] < repeats
        ]
        if items:
            launch = launch_of(cluster, items, "to judge sizing")
            yield replace(launch, est_s=2 * launch.est_s)


def measured_on_hosts(home: Path | None, repeats: int) -> TrainingData:
    """Runs of local hosts, with those that `home` has; of each setup `repeats`, one a launch."""
    with tempfile.TemporaryDirectory() as folder, reporting_to(live_reporter()):
        Path(folder, "srift.toml").write_text(settings())
        for name in GLOBAL_BATCHES:
            shutil.copy(WORKLOADS / f"{name}.py", folder)
        os.environ["SRIFT_HOME"] = str((home or Path(folder, "home")).resolve())
        os.chdir(folder)
        here, now = open_workspace("local"), datetime.now(UTC)
        here.warehouse.migrate()
        note_definitions(here, now)
        snapshot_offers(here, new_refresh_id(now), now)
        for least in range(1, repeats + 1):
            for launch in list(wanted(here, least)):
                measure_all(here, [launch], f"sizing-{new_refresh_id(datetime.now(UTC))}")
        os.chdir(ROOT)
        return TrainingData(**training_frames(here.warehouse, "local"))


def main(
    hosts: Annotated[
        bool, typer.Option("--hosts", help="measure local hosts instead of reading rows")
    ] = False,
    home: Annotated[Path | None, typer.Option(help="keeps what was measured")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="runs of each setup; the median counts")] = 1,
    cells: Annotated[bool, typer.Option("--cells", help="print every cell too")] = False,
) -> None:
    """Print the scores."""
    if hosts:
        data = measured_on_hosts(home, repeats)
    elif DATA.exists():
        bench = Bench(DATA)
        data = bench.data(np.ones(len(bench.runs), dtype=bool))
    else:
        print(f"{DATA} is not there: nothing to judge on (--hosts measures here)")
        raise typer.Exit(1)
    table = judged(data)
    if not len(table):
        raise typer.BadParameter("no global batch was measured on one, two and four or eight units")
    if cells or hosts:
        print_frame(table.round(1), "efficiency in per cent, measured and predicted")
    print_frame(
        scores(table).round(1), "errors in points of efficiency, of the cells that all three answer"
    )
    away = (
        (table["shares"].astype(float) - table["measured"])[table["held_out"] == LEFT[0]]
        .dropna()
        .abs()
    )
    if (away <= WITHIN).mean() < LEAST_SHARE:
        raise typer.Exit(1)


if __name__ == "__main__":
    with explained():
        typer.run(main)
