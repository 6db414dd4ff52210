"""Make a model predict modes that were never run and that communicate differently from DDP.

These modes use compression, Adasum, parameter servers or tensor parallelism. Each device computes
as in DDP. The bytes that a device sends and the seconds of compression come from compression.py and
tensor.py. How well a mode uses the links is unknown until it is run. Its intervals are therefore as
wide as those of a workload that was never measured on several devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from ..domain.workload import Workload
from .dataset import sent
from .model import StepTimeModel
from .one_device import Sheet
from .setup_arrays import variant

_T = TypeVar("_T")


def with_compressed(model: StepTimeModel, workload: Workload) -> StepTimeModel:
    """Return a model that also predicts modes of `workload` that communicate differently from DDP.

    A mode is added only if the workload was measured in the corresponding single-device mode. If
    no mode is added, `model` itself is returned.
    """
    facts, memory, alone = model.facts, model.memory, model.facts.alone
    new = {}
    for mode in (one for one in workload.modes if one.sends_otherwise):
        name, base = variant(workload.name, mode), variant(workload.name, mode.alone)
        divided = base in facts.exchanges and facts.exchanges[base].divided.known
        unmeasured = name not in alone.workloads and base in alone.workloads
        if unmeasured and (divided or not mode.divided):
            new[name] = base
    if not new:
        return model
    known = {name: facts.exchanges[base] for name, base in new.items() if base in facts.exchanges}
    return replace(
        model,
        facts=replace(
            facts,
            alone=replace(
                alone,
                sheets=alone.sheets | _sheets_too(alone.sheets, new),
                workloads=_named_too(alone.workloads, new),
                middle=_named_too(alone.middle, new),
                flops=_named_too(alone.flops, new),
                unusual=_named_too(alone.unusual, new),
            ),
            exchanges=facts.exchanges | {name: sent(one, name) for name, one in known.items()},
            optimizer_part=_of_pairs(facts.optimizer_part, new),
            input_part=_of_pairs(facts.input_part, new),
        ),
        memory=replace(
            memory,
            lines=_of_pairs(memory.lines, new),
            facts=_named_too(memory.facts, new),
            held=_named_too(memory.held, new),
        ),
    )


def _named_too(values: Mapping[str, _T], new: Mapping[str, str]) -> dict[str, _T]:
    """Return `values` with additional copies. `new` maps a new name to the name that is copied."""
    return dict(values) | {name: values[base] for name, base in new.items() if base in values}


def _sheets_too(sheets: Mapping[str, Sheet], new: Mapping[str, str]) -> dict[str, Sheet]:
    """Return copies of data sheets with keys "kind|workload" for the new workloads.

    `new` maps a new workload to the workload that is copied. The old sheets are not included.
    """
    return {
        key.replace("|" + base, "|" + name): sheet
        for name, base in new.items()
        for key, sheet in sheets.items()
        if key.endswith("|" + base)
    }


def _of_pairs(
    values: Mapping[tuple[str, str], _T], new: Mapping[str, str]
) -> dict[tuple[str, str], _T]:
    """Return `values`, by (workload, type), with additional copies for new workloads.

    `new` maps a new workload to the workload that is copied.
    """
    others = {
        (name, kind): one
        for name, base in new.items()
        for (owner, kind), one in values.items()
        if owner == base
    }
    return dict(values) | others
