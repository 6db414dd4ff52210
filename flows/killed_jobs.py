"""Training jobs killed at random moments: given the moments, are the predicted hours those that it took?

`python -m flows.killed_jobs --jobs 30` trains for real on this machine, each job restarted from its checkpoint. What it
should take follows from the parts of four other jobs, run before, and from the moments it was killed at. By default a
step's input comes at a fixed rate and a launch has a fixed least, so that whoever shares the machine disturbs little;
`--step-s 0 --ready-s 0 --at-once 1` leaves both as they come. A machine so busy that a launch or a step takes longer
than that least shows in the errors: run it on a quiet one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import numpy as np
import typer

from flows.cli import explained
from tasks.killed import Finished, judged, length_s, run_job, summary
from tasks.printing import print_frame

WARM_UP = 4  # jobs to learn from, each killed once
MOST_KILLS = 3


def killed_jobs(
    jobs: Annotated[int, typer.Option(help="Jobs to predict, after four to learn from.")] = 30,
    at_once: Annotated[int, typer.Option(help="Jobs run side by side.")] = 4,
    step_s: Annotated[float, typer.Option(help="Least seconds of a step.")] = 0.04,
    ready_s: Annotated[float, typer.Option(help="Least seconds from launch to first step.")] = 10.0,
    seed: int = 2026,
) -> None:
    """Each is killed one to three times, at moments drawn over somewhat more than its length."""
    rng = np.random.default_rng(seed)
    length = length_s(step_s=step_s, ready_s=ready_s)

    def run(moments: tuple[float, ...]) -> Finished:
        return run_job(moments, step_s=step_s, ready_s=ready_s)

    def drawn(kills: int) -> tuple[float, ...]:
        # the first while it is sure to be at work, others over what it may take longer for that
        moments = np.append(rng.uniform(0.0, length), rng.uniform(0.0, 1.3 * length, kills - 1))
        return tuple(float(one) for one in moments)

    plans = [(0.6 * length,)] * WARM_UP + [drawn(int(rng.integers(1, MOST_KILLS + 1))) for _ in range(jobs)]
    with ThreadPoolExecutor(at_once) as pool:
        done = list(pool.map(run, plans))
    found = judged(done[:WARM_UP], done[WARM_UP:])
    print_frame(found, "jobs killed at random moments, one line each")
    print_frame(summary(found), "predicted against actual hours, given the moments")


if __name__ == "__main__":
    with explained():
        typer.run(killed_jobs)
