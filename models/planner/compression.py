"""Whether to send something else than plain data parallelism does: only where that is known to be better.

Compressed gradients and divided layers where they are faster by more than what is not known of it: a survey found that
6 of more than 200 setups gain from compression [Shi et al. 2021]; dense is right until shown otherwise. Likewise
parameter servers, whose busiest machine sends no less than one in a ring does. Adasum nowhere: it may take fewer steps
to the same loss, and users report more of them otherwise; nothing that is measured here tells which.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from ..domain.numeric import BoolArray
from ..domain.workload import Mode, Setup, Workload
from ..step_time.setup_arrays import SetupArrays, read_setups
from .batch_split import StepModel

NOT_SHOWN = "not shown to take fewer steps than ddp"


def unproven(
    model: StepModel, arrays: SetupArrays, predicted: pd.DataFrame, tolerated: Collection[Mode]
) -> BoolArray:
    """(rows,) whether a setup is to be taken only if it is faster than plain data parallelism, and its step, at the
    upper end of its 90 % interval, takes as long as the same setup's in that, or longer; or combines them by Adasum.

    `predicted` is what the model says of `arrays`. Setups whose dense mode is not `tolerated` compete with others
    alone, and those of Adasum where nothing else is.
    """
    codes = arrays.workloads.codes
    averaged = any(not one.combined for one in tolerated)
    found = np.array([one.combined and averaged for one in arrays.modes], dtype=bool)[codes]
    doubted = [one.has_to_be_faster and one.dense in tolerated for one in arrays.modes]
    at = np.flatnonzero(np.array(doubted, dtype=bool)[codes])
    if len(at):
        dense_s = model.predict_arrays(arrays.take(at).dense())["step_s"].to_numpy(float)
        found[at] = predicted["step_high_s"].to_numpy(float)[at] >= dense_s
    return found


def compared(setup: Setup, workload: Workload, model: StepModel) -> str:
    """What the table says of sending something else than a setup does, with the seconds of a step; empty where the
    workload tolerates nothing to compare with.
    """
    ours = setup.mode
    counts = (len(setup.layout), min(setup.layout), max(setup.layout), sum(setup.layout))
    uneven = len(set(setup.batch_per_device)) > 1
    able = [one for one in workload.modes if one.runs_on(*(np.array([many]) for many in counts))[0]]
    able = [one for one in able if not (uneven and one.of_equal_batches)]
    unknown = [
        one for one in able if one.combined and one.dense == ours.dense and not ours.combined
    ]
    said = [_compressing(setup, able, model), *(f"{one.strategy}: {NOT_SHOWN}" for one in unknown)]
    return "; ".join(filter(None, said))


def _compressing(setup: Setup, able: Sequence[Mode], model: StepModel) -> str:
    ours = setup.mode
    alike = [one for one in able if one.dense == ours.dense and not one.combined]
    others = [one for one in alike if one.has_to_be_faster != ours.has_to_be_faster]
    if not others or ours.combined:
        return ""
    rows = [replace(setup, **mode._asdict()).row() for mode in (ours, *others)]
    predicted = model.predict_arrays(read_setups(pd.DataFrame(rows), {}))
    own_s, *steps_s = predicted["step_s"].astype(float).tolist()
    own_high_s, *high_s = predicted["step_high_s"].astype(float).tolist()
    if ours.has_to_be_faster:
        return _against(ours, own_s, own_high_s, others[0], steps_s[0])
    others_s = zip(others, steps_s, high_s, strict=True)
    return "; ".join(
        _against(mode, step_s, at_most, ours, own_s) for mode, step_s, at_most in others_s
    )


def _against(mode: Mode, step_s: float, at_most_s: float, dense: Mode, dense_s: float) -> str:
    how = "no faster" if at_most_s >= dense_s else "faster"
    return (
        f"{mode.strategy}: {how} than {dense.strategy} by more than its uncertainty"
        f" ({step_s:.3g} s a step, {at_most_s:.3g} s at most, against {dense_s:.3g} s)"
    )
