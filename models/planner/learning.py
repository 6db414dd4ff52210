"""Check if a strategy with compressed gradients reaches about the same training loss as DDP.

The steps of a run are divided into windows of consecutive steps. Each window has a mean loss. If
runs have different numbers of windows, the additional windows of longer runs are ignored. These
losses are averaged over seeds:

- `first`: the mean loss of DDP in the first four windows (AVERAGED)
- `dense`: the mean loss of DDP in the last four windows
- `loss`: the mean loss of the strategy in the last four windows

The strategy passes if `loss` is at most `allowed`:

    allowed = dense + 0.1 (first - dense)

All compared runs use the same cluster, batch, precision and seeds.

A run of the strategy and a run of DDP with the same seed form a pair, because their losses are
correlated. A Student's t test on the differences within the pairs decides if `loss` is above or
below `allowed`. There is no verdict in these cases:

- The number of pairs is below four (LEAST_PAIRS).
- A run has fewer than eight windows (LEAST_WINDOWS). If the strategy diverged, its runs may have
  fewer windows.
- DDP diverged.
- The difference between `loss` and `allowed` is not significant (one-sided, 95 %).
- DDP learns too little: the decrease `first - dense` is not above the spread of DDP's last losses.
  Each seed has a mean loss over the last four windows. The spread is the largest of these means
  minus the smallest.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from ..domain.workload import Mode, Workload

LEARNING_STEPS, LEARNING_WINDOWS = 200, 40  # steps of a run, and windows of these steps
LEARNING_MOST_S = 90.0  # maximum seconds of a run: enough for LEAST_WINDOWS windows of 2 s steps
LEARNING_SEEDS = 2  # number of new seeds in a launch
LEAST_PAIRS = 4  # minimum number of pairs: a run of DDP and a run of the strategy
MOST_TRIES = 3  # maximum number of launches to check a mode, including launches with failed runs
AVERAGED = 4  # windows averaged at each end of a run
LEAST_WINDOWS = 8  # windows that every compared run must have
CONFIDENCE = 0.95
TOLERANCE = 0.1  # a strategy's last loss may exceed DDP's by this share of DDP's decrease
_ALIKE = ["cluster", "layout", "batch_per_device"]


class Verdict(NamedTuple):
    """The mean training losses of a strategy (`loss`) and of DDP (`dense`) after `steps` steps.

    `loss` is infinite if training diverged. `allowed` is the highest loss with which the strategy
    can be chosen. It is a little above `dense`.
    """

    steps: int
    loss: float
    dense: float
    allowed: float

    @property
    def passes(self) -> bool:
        return self.loss <= self.allowed


def verdict(runs: pd.DataFrame, workload: Workload, mode: Mode) -> Verdict | None:
    """Compare the training losses of `mode` with those of DDP in the same precision.

    `runs` are rows of the mart `learning`. Returns None if the runs are too few, too short or too
    noisy to decide.
    """
    known = _of_mode(runs, workload, mode)
    for _, together in known[known["status"] == "measured"].groupby(_ALIKE):
        dense, runs_of_mode = (
            together[together["strategy"] == name].drop_duplicates("seed").set_index("seed")
            for name in (mode.dense.strategy, mode.strategy)
        )
        seeds = dense.index.intersection(runs_of_mode.index)
        if len(seeds) >= LEAST_PAIRS:
            found = _compare(dense.loc[seeds], runs_of_mode.loc[seeds])
            if found is not None:
                return found
    return None


def _of_mode(runs: pd.DataFrame, workload: Workload, mode: Mode) -> pd.DataFrame:
    """Return the workload's runs in `mode` and in the DDP mode with which `mode` is compared.

    Runs of an earlier definition of the workload are left out.
    """
    columns = ["workload", "workload_digest", "precision", "switches"]
    wanted = [workload.name, workload.digest, mode.precision, mode.switches]
    strategies = runs["strategy"].isin([mode.strategy, mode.dense.strategy])
    return runs[(runs[columns] == wanted).all(axis=1) & strategies]


def _compare(dense: pd.DataFrame, other: pd.DataFrame) -> Verdict | None:
    """Return the Verdict on a strategy's runs (`other`), compared with the DDP runs (`dense`).

    Both frames have a row of losses per seed, in the same order. Returns None in these cases:

    - DDP diverged, or the runs are too short.
    - DDP learns too little, compared with the spread of its last losses over all seeds.
    - The difference between the two runs of a seed varies too much from seed to seed.
    """
    diverged = other["diverged"].astype(bool).any()
    counted = [dense] if diverged else [dense, other]
    windows = min(len(losses) for frame in counted for losses in frame["losses"])
    if windows < LEAST_WINDOWS or dense["diverged"].astype(bool).any():
        return None
    plain = np.array([losses[:windows] for losses in dense["losses"]], float)
    first, ends = float(plain[:, :AVERAGED].mean()), plain[:, -AVERAGED:].mean(axis=1)
    last = float(ends.mean())
    if first - last <= np.ptp(ends):
        return None
    margin, excess = TOLERANCE * (first - last), np.inf
    if not diverged:
        tails = [np.mean(losses[windows - AVERAGED : windows]) for losses in other["losses"]]
        apart = tails - ends
        excess, error = float(apart.mean()), apart.std(ddof=1) / len(apart) ** 0.5
        if abs(excess - margin) < stdtrit(len(apart) - 1, CONFIDENCE) * error:
            return None
    return Verdict(
        steps=windows * int(dense["steps_a_window"].iloc[0]),
        loss=last + excess,
        dense=last,
        allowed=last + margin,
    )


def vetoes(runs: pd.DataFrame, workload: Workload) -> dict[Mode, str]:
    """Return the modes of the workload that must not be chosen, as {mode: reason}.

    A mode with compressed gradients may be chosen only if runs have shown that the mode converges
    like DDP. `runs` are rows of the mart `learning`.
    """
    found = {}
    for mode in _unproven_modes(workload):
        known, dense = verdict(runs, workload, mode), mode.dense.strategy
        if known is None:
            found[mode] = f"{mode.strategy}: no run has shown yet that it converges like {dense}"
        elif not known.passes:
            loss = f"{known.loss:.3g} after {known.steps} steps"
            found[mode] = (
                f"{mode.strategy}: its loss is {loss}, while {dense} reaches {known.dense:.3g}"
                f" (at most {known.allowed:.3g} is allowed)"
            )
    return found


def unknown_learning(
    runs: pd.DataFrame, workloads: Sequence[Workload]
) -> list[tuple[Workload, Mode, range]]:
    """Return the (workload, mode, seeds) triples for which convergence must still be measured.

    `runs` are rows of the mart `learning`. Only modes with compressed gradients are checked, for
    workloads that also allow DDP. A mode is left out if its verdict is known, or after three
    launches (MOST_TRIES). Runs with a `cause` do not count: they failed because of the machine, the
    data or the installation of requirements.
    """
    found = []
    for workload in workloads:
        for mode in _unproven_modes(workload):
            runs_of_mode = _of_mode(runs, workload, mode).query(
                "strategy == @mode.strategy and cause == ''"
            )
            tried = int(runs_of_mode["status"].isin(["measured", "failed"]).sum())
            if verdict(runs, workload, mode) is None and tried < MOST_TRIES * LEARNING_SEEDS:
                found.append((workload, mode, range(tried + 1, tried + 1 + LEARNING_SEEDS)))
    return found


def _unproven_modes(workload: Workload) -> list[Mode]:
    """Return the modes with compressed gradients for which the workload also allows plain DDP."""
    return [mode for mode in workload.modes if mode.compressed and mode.dense in workload.modes]
