"""Decide if a strategy that communicates differently from DDP is reliably faster than DDP.

These strategies are compressed gradients, tensor parallelism and parameter servers. The planner
chooses them only if they are faster than DDP by more than the uncertainty of the prediction. A
survey found that only 6 of more than 200 setups gain from compression [Shi et al. 2021].
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from ..domain.numeric import BoolArray
from ..domain.workload import Mode, Setup, Workload
from ..step_time.model import StepTimeModel
from ..step_time.setup_arrays import SetupArrays, read_setups


def unproven(
    model: StepTimeModel, arrays: SetupArrays, predicted: pd.DataFrame, tolerated: Collection[Mode]
) -> BoolArray:
    """Return a (setups,) mask: True if a setup's mode must be reliably faster than DDP, but is not.

    Only some modes must be faster (`Mode.must_be_faster`): compressed gradients, tensor parallelism
    and parameter servers. Such a mode is reliably faster if the upper end of its predicted interval
    is below the prediction for DDP. The mask is False if DDP is not in `tolerated`.

    arrays: the setups.
    predicted: the model's predictions for `arrays`.
    tolerated: the modes from which the planner can choose.
    """
    doubted = [mode.must_be_faster and mode.dense in tolerated for mode in arrays.modes]
    found = np.array(doubted, bool)[arrays.mode]
    at = np.flatnonzero(found)
    if len(at):
        dense_s = model.predict_arrays(arrays.take(at).dense())["step_s"].to_numpy(float)
        found[at] = predicted["step_high_s"].to_numpy(float)[at] >= dense_s
    return found


def able_modes(setup: Setup, modes: Sequence[Mode]) -> list[Mode]:
    """Return the `modes` in which the cluster of `setup` can train with the batches of `setup`."""
    equal = len(set(setup.batch_per_device)) == 1
    return [
        mode
        for mode in modes
        if runs_on(setup.layout, mode) and (equal or not mode.of_equal_batches)
    ]


def runs_on(layout: Sequence[int], mode: Mode) -> bool:
    """Return True if `mode` can train on a cluster whose machine i uses `layout[i]` devices."""
    sizes = np.array([[len(layout)], [min(layout)], [max(layout)], [sum(layout)]])
    return bool(mode.runs_on(*sizes)[0])


def strategy_notes(
    setups: Sequence[Setup], workload: Workload, model: StepTimeModel, vetoes: Mapping[Mode, str]
) -> list[str]:
    """Return, for each setup, a text about the strategies that could replace DDP on its cluster.

    Only modes with the precision and switches of the setup are considered. The cluster must support
    the mode.

    - For each mode in `vetoes`, the text gives the reason of the veto.
    - For each mode of the workload that must be faster than DDP (`Mode.must_be_faster`), the text
      says if it is reliably faster. If the workload or the cluster does not support DDP, the text
      does not make this comparison.
    """
    reasons: list[list[str]] = []
    rivals: list[tuple[int, Setup]] = []  # with positions in `setups`
    for at, setup in enumerate(setups):
        dense, able = setup.mode.dense, able_modes(setup, workload.modes)
        vetoed = able_modes(setup, list(vetoes))
        reasons.append([vetoes[mode] for mode in vetoed if mode.dense == dense])
        for mode in able:
            if dense in able and mode.must_be_faster and mode.dense == dense:
                rivals.append((at, replace(setup, mode=mode)))
    if rivals:
        arrays = read_setups(pd.DataFrame([rival.row() for _, rival in rivals]), {})
        predicted = model.predict_arrays(arrays)[["step_s", "step_high_s"]].to_numpy()
        dense_step_s = model.predict_arrays(arrays.dense())["step_s"]
        for (at, rival), (step_s, high_s), dense_s in zip(
            rivals, predicted, dense_step_s, strict=True
        ):
            reasons[at].append(
                f"{rival.mode.strategy}: {'no faster' if high_s >= dense_s else 'faster'} than"
                f" {rival.mode.dense.strategy}, given its uncertainty ({step_s:.3g} s per step,"
                f" upper bound {high_s:.3g} s, against {dense_s:.3g} s)"
            )
    return ["; ".join(found) for found in reasons]
