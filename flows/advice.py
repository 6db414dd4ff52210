"""Does the advice hold? Ten questions, each answer run for real beside its runner-up and what habit would pick.

`python -m flows.advice`; regret = (true cost of the choice) / (best true cost of the three) - 1, at one global batch.
"""

from __future__ import annotations

from datetime import UTC, datetime

import typer

from flows.cli import explained
from tasks.advice import ask, by_role, judge, launches_for
from tasks.circumstances import circumstances
from tasks.installation import new_refresh_id, open_installation
from tasks.printing import live_reporter, print_frame
from tasks.report import reporting_to
from tasks.trial import measure_all


def advice(questions: int = 10) -> None:
    """Ask, measure every named setup, and print hours, dollars and regret of each answer."""
    here = open_installation("local")
    asked = ask(here, questions)
    trial_id = f"advice-{new_refresh_id(datetime.now(UTC))}"
    with reporting_to(live_reporter()):
        measured = measure_all(here, launches_for(here, asked), trial_id)
    judged = judge(asked, measured, circumstances(here))
    folder = here.home / "trials"
    folder.mkdir(exist_ok=True)
    judged.to_csv(folder / f"{trial_id}.csv", index=False)
    print_frame(judged, f"{len(asked)} questions, {len(measured)} runs")
    print_frame(
        by_role(judged), "by role: how many met their constraint, regret of those that did, error of the promise"
    )


if __name__ == "__main__":
    with explained():
        typer.run(advice)
