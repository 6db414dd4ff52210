"""Judge the champion on setups that nobody has measured: draw by the seeded rule, predict, then measure.

`python -m tests.benchmarks.holdout --count 110`; the runs and what was expected of them land in SRIFT_HOME/trials/. Of
workloads that tolerate several modes each setup is in one of them; to judge all kinds, as root on a quiet machine:

    export SRIFT_ROOT=tests/benchmarks/modes SRIFT_HOME=$PWD/.srift/modes    two workloads, eighteen modes, three types
    srift refresh --max-usd 2                                                about fifteen minutes
    python -m tests.benchmarks.holdout --count 110                           about twenty minutes
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
from tasks.training.registry import load_champion
from tasks.workspace.workspace import new_refresh_id, offers_of_market, open_workspace
from tests.benchmarks.trial import compare, draw, keys_of, launch_of, measure_all, summary
from warehouse.reads import training_frames


def holdout(
    count: Annotated[int, typer.Option(min=1)] = 110,
    seed: int = 2026,
    max_hosts: Annotated[int, typer.Option()] = 4,
) -> None:
    """Draw, measure, compare; prints errors and interval coverage, the champion's beside two baselines."""
    here = open_workspace("local")
    champion = load_champion(here.home, "local")
    if champion is None:
        raise typer.BadParameter("no champion is in force yet: run `srift refresh` first")
    data = TrainingData(**training_frames(here.warehouse, "local"))
    offers = offers_of_market(current_offers(here), "on-demand")
    known = [champion.model.as_measured(one) for one in here.measurable]
    unknown = [
        f"{one.name} in {mode}"
        for one, met in zip(here.measurable, known, strict=True)
        for mode in one.modes
        if mode not in met.modes
    ]
    if unknown:
        print(f"never measured yet, and not drawn: {', '.join(unknown)}")
    drawn = draw(
        [one for one in known if one.modes],
        offers,
        max_hosts=max_hosts,
        fits=here.fits,
        measured=keys_of(data.runs),
        count=count,
        seed=seed,
    )
    trial_id = f"holdout-{new_refresh_id(datetime.now(UTC))}"
    with reporting_to(live_reporter()):
        measured = measure_all(
            here, [launch_of(*one, "setup drawn to judge the champion") for one in drawn], trial_id
        )
    if measured.empty:
        raise typer.BadParameter("nothing was measured: the lines above say why")
    compared = compare(champion.model, data, measured)
    folder = here.home / "trials"
    folder.mkdir(exist_ok=True)
    compared.to_csv(folder / f"{trial_id}.csv", index=False)
    print_frame(
        summary(compared),
        f"{len(compared)} setups never measured, champion version {champion.version}",
    )


if __name__ == "__main__":
    with explained():
        typer.run(holdout)
