"""Runs the small training job, kills it at given moments, starts it again from its checkpoint, and says how it went.

It kills nothing but the process it started itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from models.circumstances.interrupted import hours_given

PIECES, STEPS_A_PIECE, WIDTH = 10, 50, 256
_LEAST_STEP_S, _LEAST_READY_S = 0.001, 3.0  # about what they take by themselves, on a machine of 2026
_PATIENCE_S = 120.0  # for a job to end by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """One job that reached its end: seconds in all, the moments it was killed at, and what its parts took."""

    seconds: float
    killed_at: tuple[float, ...]
    startup_s: tuple[float, ...]  # first launches that got as far as a first step
    replacement_s: tuple[float, ...]  # later ones
    piece_s: tuple[float, ...]
    checkpoint_s: tuple[float, ...]


def length_s(*, step_s: float, ready_s: float) -> float:
    """About how long a job takes that is left alone: where to expect its end when moments are drawn."""
    return max(ready_s, _LEAST_READY_S) + PIECES * STEPS_A_PIECE * max(step_s, _LEAST_STEP_S)


def run_job(kill_at: Sequence[float], *, step_s: float = 0.0, ready_s: float = 0.0) -> Finished:
    """Train to the end, killed at `kill_at` (seconds since the start; those after its end do nothing).

    No step takes less than `step_s`, and no launch is ready in less than `ready_s`: on a machine that others use too,
    its own times are too uneven to judge anything by.
    Raises RuntimeError where the training fails by itself, TimeoutError where it does not end.
    """
    with tempfile.TemporaryDirectory(prefix="srift-killed-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", "tasks.killed_trainer", name, "--pieces", str(PIECES)]
        command += ["--steps-a-piece", str(STEPS_A_PIECE), "--width", str(WIDTH)]
        command += ["--step-s", str(step_s), "--ready-s", str(ready_s)]
        begun = time.monotonic()
        killed: list[float] = []
        launched: list[float] = []
        for moment in [*sorted(kill_at), None]:
            left = _PATIENCE_S if moment is None else begun + moment - time.monotonic()
            if moment is not None and left <= 0:
                continue  # the machine was late: a kill that was due while the last one was dealt with
            launched.append(time.monotonic())
            moment_killed = _killed_after([*command, "--launched", str(launched[-1])], left)
            if moment_killed is None:
                break
            if moment is None:
                raise TimeoutError(f"the training job did not end within {_PATIENCE_S:g} s")
            killed.append(moment_killed)
        return _read(folder, begun, killed, launched)


def _killed_after(command: Sequence[str], seconds: float) -> float | None:
    """The moment the process was killed, `seconds` after its start and unwarned; None where it ended by itself."""
    root = Path(__file__).resolve().parents[1]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        _, said = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        moment = time.monotonic()
        process.kill()
        process.communicate()
        return moment
    if process.returncode != 0:
        raise RuntimeError(f"the training job failed by itself: {said.strip()[-500:]}")
    return None


def _read(folder: Path, begun: float, killed: Sequence[float], launched: Sequence[float]) -> Finished:
    lines = (folder / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    first: list[float] = []
    later: list[float] = []
    for event in events:
        if event["what"] == "ready":
            since = max(one for one in launched if one <= event["at"])
            (later if first else first).append(event["at"] - since)
    end = next(event["at"] for event in events if event["what"] == "done")
    return Finished(
        seconds=end - begun,
        killed_at=tuple(moment - begun for moment in killed if moment < end),
        startup_s=tuple(first),
        replacement_s=tuple(later),
        piece_s=tuple(event["seconds"] for event in events if event["what"] == "piece"),
        checkpoint_s=tuple(event["seconds"] for event in events if event["what"] == "checkpoint"),
    )


def predicted_s(before: Sequence[Finished], killed_at: Sequence[float]) -> float:
    """Seconds of a job killed at `killed_at`, by the medians of the jobs `before` it. Knows no more of the job."""
    starts = [one for job in before for one in job.startup_s]
    again = [one for job in before for one in job.replacement_s] or starts
    piece = float(np.median([one for job in before for one in job.piece_s]))
    return hours_given(
        killed_at,
        work_hours=PIECES * piece,
        interval_hours=piece,
        startup_hours=float(np.median(starts)),
        checkpoint_hours=float(np.median([one for job in before for one in job.checkpoint_s])),
        replacement_hours=float(np.median(again)),
    )


def judged(before: Sequence[Finished], jobs: Sequence[Finished]) -> pd.DataFrame:
    """Each of `jobs` beside what was to be expected of it by those `before` and its moments; per cent off."""
    rows = [
        {
            "job": number,
            "kills": len(job.killed_at),
            "predicted_s": predicted_s(before, job.killed_at),
            "actual_s": job.seconds,
        }
        for number, job in enumerate(jobs, start=1)
    ]
    found = pd.DataFrame(rows)
    return found.assign(**{"off_%": 100 * (found["predicted_s"] / found["actual_s"] - 1)})


def summary(found: pd.DataFrame) -> pd.DataFrame:
    """One row of what `judged` found: jobs, kills, the mean of the errors without sign, and with it."""
    return pd.DataFrame(
        {
            "jobs": [len(found)],
            "kills": [int(found["kills"].sum())],
            "mean_error_%": [float(found["off_%"].abs().mean())],
            "bias_%": [float(found["off_%"].mean())],
        }
    )
