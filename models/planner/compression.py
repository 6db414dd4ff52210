"""Decide if a strategy that communicates differently from DDP is predicted to be faster than DDP.

Compressed gradients, tensor parallelism and parameter servers must be faster than DDP by more than
the uncertainty of the prediction. A survey found that only 6 of more than 200 setups gain from
compression [Shi et al. 2021].
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import pandas as pd

from ..domain.numeric import BoolArray
from ..domain.workload import Mode, Setup, Workload
from ..step_time.model import StepTimeModel
from ..step_time.setup_arrays import SetupArrays, read_setups


def unproven(
    model: StepTimeModel, arrays: SetupArrays, predicted: pd.DataFrame, tolerated: Collection[Mode]
) -> BoolArray:
    """Return a (setups,) mask that is True if a setup must be reliably faster than DDP, but is not.

    A setup is reliably faster if the upper end of its predicted interval is below the prediction
    for DDP. `predicted` has the model's predictions for `arrays`. `tolerated` are the modes that
    may be chosen. The mask is False for a setup whose DDP mode is not among them, because DDP is
    then no alternative.
    """
    doubted = [one.must_be_faster and one.dense in tolerated for one in arrays.modes]
    found = np.array(doubted, dtype=bool)[arrays.mode]
    at = np.flatnonzero(found)
    if len(at):
        dense_s = model.predict_arrays(arrays.take(at).dense())["step_s"].to_numpy(float)
        found[at] = predicted["step_high_s"].to_numpy(float)[at] >= dense_s
    return found


def able_modes(setup: Setup, modes: Sequence[Mode]) -> list[Mode]:
    """Return the `modes` in which the setup's cluster can train with the setup's batches."""
    uneven = len(set(setup.batch_per_device)) > 1
    able = [mode for mode in modes if runs_on(setup.layout, mode)]
    return [mode for mode in able if not (uneven and mode.of_equal_batches)]


def runs_on(layout: Sequence[int], mode: Mode) -> bool:
    """Return True if `mode` can train on a cluster that uses `layout` devices of its machines."""
    sizes = np.array([[len(layout)], [min(layout)], [max(layout)], [sum(layout)]])
    return bool(mode.runs_on(*sizes)[0])


def compared(setups: Sequence[Setup], workload: Workload, model: StepTimeModel) -> list[str]:
    """Return a text for each setup, which compares DDP with strategies that must be faster.

    The text is empty if the workload allows no such strategy, or no DDP, on the setup's cluster.
    """
    modes: list[list[Mode]] = []  # for each setup: DDP and its rivals; empty if it has none
    for setup in setups:
        dense, able = setup.mode.dense, able_modes(setup, workload.modes)
        rivals = [mode for mode in able if mode.must_be_faster and mode.dense == dense]
        modes.append([dense, *rivals] if dense in able and rivals else [])
    rows = [
        replace(setup, **mode._asdict()).row()
        for setup, own in zip(setups, modes, strict=True)
        for mode in own
    ]
    if not rows:
        return [""] * len(setups)
    frame = model.predict_arrays(read_setups(pd.DataFrame(rows), {}))
    predicted = iter(frame[["step_s", "step_high_s"]].itertuples(index=False, name=None))
    return [_compared(own, list(islice(predicted, len(own)))) for own in modes]


def _compared(modes: Sequence[Mode], seconds: Sequence[tuple[float, float]]) -> str:
    """Return the text of `compared` for a setup. `modes` are DDP and the strategies to compare.

    `seconds` has, for each mode, the predicted step seconds and their upper bound.
    """
    if not modes:
        return ""
    dense_s = seconds[0][0]
    return "; ".join(
        f"{mode.strategy}: {'no faster' if high_s >= dense_s else 'faster'} than"
        f" {modes[0].strategy}, given its uncertainty ({step_s:.3g} s per step, at most"
        f" {high_s:.3g} s, against {dense_s:.3g} s)"
        for mode, (step_s, high_s) in zip(modes[1:], seconds[1:], strict=True)
    )
