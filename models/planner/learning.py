"""Does a strategy that changes the step learn as dense data parallelism does? By the losses of as many steps.

    allowed = dense + max(0.1 (first - dense), apart)       passes where the strategy's loss is at most that

`dense` is the mean over seeds of plain data parallelism's loss in the last AVERAGED windows of steps that all runs
have, `first` that in the first ones, and `apart` the most that its seeds differ by in the last. Where dense learned no
more than `apart`, nothing is shown. All runs are of one cluster, batch, precision and set of seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..domain.workload import Mode, Workload

LEARNING_STEPS, LEARNING_WINDOWS = 200, 40
LEARNING_MOST_S = (
    90.0  # of one run: LEAST_WINDOWS of steps of 2 s; then the windows that it has are compared
)
LEARNING_SEEDS = (1, 2)  # what other weights and batches change is the noise
AVERAGED = 4  # windows at either end: a window is short, so that a slow training has several within its seconds
LEAST_WINDOWS = 8  # that all runs must have: fewer tell little of what is learned
MOST_TRIES = 3  # of a strategy's runs from each seed
TOLERANCE = 0.1  # of what dense learned
_ALIKE = ["cluster", "layout", "batch_per_device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Losses after `steps` steps, means over seeds; `loss` is infinite where training ended on no number."""

    steps: int
    loss: float
    dense: float
    allowed: float

    @property
    def passes(self) -> bool:
        """Whether as much is learned."""
        return self.loss <= self.allowed


def verdict(runs: pd.DataFrame, workload: Workload, mode: Mode) -> Verdict | None:
    """Of `mode` by rows of the mart `learning`; None where they do not tell: other definitions' runs, one seed alone,
    or fewer than LEAST_WINDOWS that all have. Of several clusters the first that tells.
    """
    if not len(runs):
        return None
    mine = runs[
        (runs["workload"] == workload.name)
        & (runs["workload_digest"] == workload.digest)
        & (runs["precision"] == mode.precision)
        & (runs["switches"] == mode.switches)
        & (runs["status"] == "measured")
    ]
    for _, together in mine.groupby(_ALIKE, sort=True) if len(mine) else ():
        dense, own = (
            together[together["strategy"] == one].drop_duplicates("seed").set_index("seed")
            for one in (mode.dense.strategy, mode.strategy)
        )
        seeds = dense.index.intersection(own.index)
        if len(seeds) >= len(LEARNING_SEEDS) and (
            found := _compared(dense.loc[seeds], own.loc[seeds])
        ):
            return found
    return None


def _compared(dense: pd.DataFrame, own: pd.DataFrame) -> Verdict | None:
    """Of a row a seed each, in one order."""
    diverged = own["diverged"].astype(bool).any()
    counted = [dense] if diverged else [dense, own]
    windows = min(len(losses) for frame in counted for losses in frame["losses"])
    if windows < LEAST_WINDOWS or dense["diverged"].astype(bool).any():
        return None
    plain = np.array([losses[:windows] for losses in dense["losses"]], dtype=float)
    first, ends = plain[:, :AVERAGED].mean(), plain[:, -AVERAGED:].mean(axis=1)
    last, apart = ends.mean(), float(np.ptp(ends))
    if first - last <= apart:
        return None
    loss = np.inf
    if not diverged:
        loss = float(np.mean([losses[windows - AVERAGED : windows] for losses in own["losses"]]))
    allowed = float(last + max(TOLERANCE * (first - last), apart))
    return Verdict(
        steps=windows * int(dense["steps_a_window"].iloc[0]),
        loss=loss,
        dense=float(last),
        allowed=allowed,
    )


def vetoes(runs: pd.DataFrame, workload: Workload) -> dict[Mode, str]:
    """Why modes of the workload may not be chosen, by what they learn; who tolerates no dense mode is asked nothing."""
    found = {}
    for mode in workload.modes:
        if not _asked(workload, mode):
            continue
        known = verdict(runs, workload, mode)
        named, dense = mode.strategy, mode.dense.strategy
        if known is None and _tried(runs, workload, mode):
            found[mode] = f"{named}: its runs could not show that it learns as {dense} does"
        elif known is None:
            found[mode] = (
                f"{named}: not shown yet to learn as {dense} does; a refresh that may launch two machines runs"
                f" {LEARNING_STEPS} steps of both where the workload's file is given"
            )
        elif not known.passes:
            said = f"{known.loss:.3g}" if np.isfinite(known.loss) else "no number"
            found[mode] = (
                f"{named}: after {known.steps} steps its loss is {said}, {dense}'s {known.dense:.3g}"
                f" ({known.allowed:.3g} allowed)"
            )
    return found


def unknown_learning(
    runs: pd.DataFrame, workloads: Sequence[Workload]
) -> list[tuple[Workload, Mode]]:
    """Workloads and modes that a launch with two machines is to show the learning of: nobody tried it yet."""
    return [
        (workload, mode)
        for workload in workloads
        for mode in workload.modes
        if _asked(workload, mode)
        and verdict(runs, workload, mode) is None
        and not _tried(runs, workload, mode)
    ]


def _asked(workload: Workload, mode: Mode) -> bool:
    """Whether something is to be shown: of a mode beside which the workload tolerates the dense one."""
    return mode.compressed and mode.dense in workload.modes


def _tried(runs: pd.DataFrame, workload: Workload, mode: Mode) -> bool:
    """Whether it was run so often that nothing else is to be expected: on one cluster together with the dense mode from
    each seed, or MOST_TRIES times from each, but for what a machine, data or requirements caused.
    """
    if not len(runs):
        return False
    alike: Mapping[str, str] = {"workload": workload.name, "workload_digest": workload.digest}
    alike = {**alike, "precision": mode.precision, "switches": mode.switches}
    mine = runs[np.logical_and.reduce([runs[name] == value for name, value in alike.items()])]
    own = mine[mine["strategy"] == mode.strategy]
    if (
        own["status"].isin(["measured", "failed"]) & (own["cause"] == "")
    ).sum() >= MOST_TRIES * len(LEARNING_SEEDS):
        return True
    measured = mine[
        (mine["status"] == "measured") & mine["strategy"].isin([mode.strategy, mode.dense.strategy])
    ]
    seeds = measured.groupby([*_ALIKE, "seed"])["strategy"].nunique()
    return bool(
        len(seeds) and ((seeds == 2).groupby(level=_ALIKE).sum() >= len(LEARNING_SEEDS)).any()
    )
