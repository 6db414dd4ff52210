"""How good is what is said about jobs on spot machines, on records that it has not seen: every part, then the whole.

`python -m tests.benchmarks.spot` reads `../shared/data` and prints the errors of checkpoint seconds and of step times
of networks held out, and how often jobs replayed on recorded prices take longer than their stated 90th percentile.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from flows.cli import explained
from models.domain.cluster import bucket_hazard
from tasks.reporting.tables import print_frame
from tests.benchmarks.spot_replay import (
    MARGINS,
    checkpoint_scores,
    exceeded,
    guess_scores,
    read_buckets,
    read_checkpoints,
    read_launches,
    read_prices,
    read_spot_prices,
    read_step_times,
    replay_scores,
)

DATA = Path("../shared/data")


def bench_spot(
    step_times: Annotated[Path, typer.Option(help="Step times by network and device.")] = DATA
    / "single_gpu_step_times.csv",
    checkpoints: Annotated[Path, typer.Option(help="Seconds to write so many MB.")] = DATA
    / "checkpoint_times.csv",
    launches: Annotated[Path, typer.Option(help="Seconds from request to running.")] = DATA
    / "vm_startup.csv",
    prices: Annotated[Path, typer.Option(help="Spot price changes by zone.")] = DATA
    / "spot_prices.csv",
    advisor: Annotated[Path, typer.Option(help="Spot Advisor's buckets.")] = DATA
    / "ec2_spot_advisor.csv",
    jobs: Annotated[int, typer.Option(help="Jobs replayed in each split, for each bid.")] = 600,
    seed: int = 2026,
) -> None:
    """Nothing is chosen by what comes out."""
    written = read_checkpoints(checkpoints)
    scored = checkpoint_scores(written)
    for learned, title in ((False, "by the prior"), (True, "learned from the other networks'")):
        part = scored[scored["learned"] == learned]
        errors = _errors(part, "group").assign(median_width=float(part["width"].median()))
        print_frame(errors, f"checkpoint seconds {title}, each network held out, per cent")
    print_frame(
        _errors(guess_scores(read_step_times(step_times)), "workload"),
        "step time from FLOPs alone, each network held out, per cent",
    )
    record = read_spot_prices(prices)
    launched = read_launches(launches, sorted(record["instance_type"].unique()))
    pools, parts = read_prices(record), []
    for margin in MARGINS:
        found = replay_scores(pools, written, launched, margin=margin, many=jobs, seed=seed).assign(
            bid=f"{100 * margin:g} % above"
        )
        parts.append(found)
        typer.echo(f"  bids {100 * margin:g} % above the price: {len(found)} jobs", err=True)
    by_bid = [exceeded(part).assign(bid=part["bid"].iloc[0]) for part in parts]
    whole = exceeded(pd.concat(parts)).assign(bid="all")
    print_frame(
        pd.concat([*by_bid, whole]).set_index("bid").reset_index(),
        "jobs replayed on recorded spot prices",
    )
    counts = pd.Series(read_buckets(advisor, "us-east-1")).value_counts().sort_index()
    print_frame(
        pd.DataFrame(
            {
                "bucket": counts.index,
                "types_in_us_east_1": counts.to_numpy(),
                "prior_mean_hours_to_interruption": [
                    1 / bucket_hazard(int(one)) for one in counts.index
                ],
            }
        ),
        "Spot Advisor's buckets as the prior",
    )


def _errors(scored: pd.DataFrame, group: str) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "networks": [scored[group].nunique()],
            "rows": [len(scored)],
            "median_error": [100 * float(scored["error"].median())],
            "mean_error": [100 * float(scored["error"].mean())],
            "inside_90": [100 * float(scored["inside"].mean())],
        }
    )


if __name__ == "__main__":
    with explained():
        typer.run(bench_spot)
