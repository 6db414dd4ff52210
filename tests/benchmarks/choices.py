"""How good are the choices on this machine: every cluster at one global batch, each workload held out in turn.

`python -m tests.benchmarks.choices --measure 24` first measures every host alone and that many clusters of several,
each workload at its least global batch; what was measured before counts too. With `--rounds 3` it measures all of
them three times, round after round, and only setups with three runs count, by their median. Then the model is asked
without the workload's runs on several machines.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from flows.cli import explained
from models.step_time.dataset import TrainingData
from tasks.market.offers import current_offers
from tasks.reporting.progress import reporting_to
from tasks.reporting.tables import live_reporter, print_frame
from tasks.workspace.workspace import new_refresh_id, offers_of_market, open_workspace
from tests.benchmarks.choice_scores import contests, scores
from tests.benchmarks.trial import at_one_batch, keys_of, launch_of, measure_all
from warehouse.reads import mart, training_frames


def choice(
    measure: Annotated[
        int, typer.Option(min=0, help="Clusters of several hosts to measure first.")
    ] = 0,
    rounds: Annotated[
        int, typer.Option(min=1, help="Times to measure each, and runs of a setup that counts.")
    ] = 1,
    max_hosts: Annotated[int, typer.Option(min=2)] = 4,
    pilots: Annotated[
        int,
        typer.Option(
            min=0, help="Runs that the model may know, those that `srift recommend` names."
        ),
    ] = 0,
    seed: int = 2026,
) -> None:
    """Measure if asked; print how often each chooser misses its constraint, its regret where it does not, what each
    rule loses by caution and by error, and how often the chances printed hold."""
    here = open_workspace("local")
    offers = offers_of_market(current_offers(here), "on-demand")
    if measure:
        known = keys_of(mart(here.warehouse, "runs", provider="local")) if rounds == 1 else set()
        drawn = at_one_batch(
            here.measurable,
            offers,
            max_hosts=max_hosts,
            fits=here.fits,
            measured=known,
            clusters=measure,
            seed=seed,
        )
        with reporting_to(live_reporter()):
            measure_all(
                here,
                [launch_of(*one, "measured to judge the choices") for one in drawn * rounds],
                f"choice-{new_refresh_id(datetime.now(UTC))}",
            )
    data = TrainingData(**training_frames(here.warehouse, "local"))
    prices = {
        one.instance_type.name: one.usd_per_hour for one in offers if one.usd_per_hour is not None
    }
    devices = {one.instance_type.name: one.instance_type.devices for one in offers}
    played = []
    for workload, batch, contest in contests(
        data, devices, prices, pilots=pilots, seed=seed, runs=rounds
    ):
        played.append(contest)
        typer.echo(f"  {workload} at {batch:g}: {len(contest.measured_s)} setups", err=True)
    if not played:
        raise typer.BadParameter(
            "no workload has 8 setups measured at one global batch: measure some (--measure 24)"
        )
    but = f" but for {pilots} pilots" if pilots else ""
    for what, table in scores(played, seed=seed):
        print_frame(table, f"each workload held out{but}: {what}")


if __name__ == "__main__":
    with explained():
        typer.run(choice)
