"""The step-time model as JSON and back, exactly: Python writes floats so that they read back bit for bit."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from .dataset import Exchange
from .input import Loaders
from .machine_specs import Machine
from .memory import Held, MemoryModel, Ran
from .model import Measured, StepTimeModel, lay_out
from .one_device import OneDevice
from .rows import Facts
from .setup_arrays import SetupArrays
from .tensor import Volumes

_FORMAT = "srift-step-time-10"


class OtherFormat(ValueError):
    """Text that another version of the project wrote, or that is no model at all."""


def dump(model: StepTimeModel) -> str:
    """The model as text."""
    facts, measured, memory = model.facts, model.measured, model.memory
    setups = measured.setups
    body = {
        "format": _FORMAT,
        "provider": model.provider,
        "machines": {name: asdict(one) for name, one in facts.machines.items()},
        "alone": facts.alone.to_dict(),
        # an unknown number is null: JSON has no NaN
        "exchanges": {
            name: [_known(one) for one in _exchange(own)] for name, own in facts.exchanges.items()
        },
        "optimizer_part": [[*pair, one] for pair, one in facts.optimizer_part.items()],
        "slowness": facts.slowness,
        "input_part": [[*pair, one] for pair, one in facts.input_part.items()],
        "memory": [[*pair, *line] for pair, line in memory.lines.items()],
        "memory_facts": memory.facts,
        "memory_ran": memory.ran,
        "memory_accumulated": memory.accumulated,
        "memory_held": memory.held,
        "measured": {
            "workloads": list(setups.workloads),
            "types": setups.types,
            "batch": setups.batch.tolist(),
            "layout": setups.layout.tolist(),
            "accumulation": setups.accumulation.tolist(),
            "log_step": measured.log_step.tolist(),
            "weight": measured.weight.tolist(),
            "run_sd": measured.run_sd,
            "probes": measured.probes.to_dict("split", index=False),
            "profiled": measured.profiled,
        },
        "regression": model.regression.to_dict(),
        "loaders": {
            "workers": model.loaders.workers,
            "samples": [[*pair, *cost] for pair, cost in model.loaders.samples.items()],
            "fixed_s": model.loaders.fixed_s,
            "off": model.loaders.off,
        },
        "guessed": sorted(model.guessed),
        "trained_on": model.trained_on,
        "workload_digests": model.workload_digests,
        "type_digests": model.type_digests,
    }
    return json.dumps(body, allow_nan=False)


def load(text: str) -> StepTimeModel:
    """The model in `text`. Raises OtherFormat on text that is no such model."""
    body: dict[str, Any] = json.loads(text)
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise OtherFormat(f"not a step-time model of the format {_FORMAT}")
    facts = Facts(
        machines={name: Machine(**one) for name, one in body["machines"].items()},
        alone=OneDevice.from_dict(body["alone"]),
        exchanges={name: _read_exchange(own) for name, own in body["exchanges"].items()},
        optimizer_part={(workload, kind): one for workload, kind, one in body["optimizer_part"]},
        slowness=body["slowness"],
        input_part={(workload, kind): one for workload, kind, one in body["input_part"]},
    )
    measured = _measured(body["measured"])
    regression = lay_out(facts, measured)
    regression.read(body["regression"])
    return StepTimeModel(
        provider=body["provider"],
        facts=facts,
        regression=regression,
        measured=measured,
        memory=MemoryModel(
            lines={
                (workload, name): (first, second)
                for workload, name, first, second in body["memory"]
            },
            facts={name: (first, second) for name, (first, second) in body["memory_facts"].items()},
            held={
                name: Held(*own) for name, own in body.get("memory_held", {}).items()
            },  # models before sharding
            ran=_ran(body["memory_ran"]),
            accumulated=_ran(body.get("memory_accumulated", {})),
        ),
        loaders=_loaders(body.get("loaders")),
        guessed=frozenset(body["guessed"]),
        trained_on=tuple(body["trained_on"]),
        workload_digests=body["workload_digests"],
        type_digests=body["type_digests"],
    )


def _loaders(body: dict[str, Any] | None) -> Loaders:
    if body is None:  # a model from before there were any
        return Loaders()
    return Loaders(
        workers=body["workers"],
        samples={(workload, name): (one, other) for workload, name, one, other in body["samples"]},
        fixed_s=body["fixed_s"],
        off={name: (mean, sd) for name, (mean, sd) in body["off"].items()},
    )


def _read_exchange(own: list[float | None]) -> Exchange:
    """Older models know nothing of what is divided."""
    size, hidden, last, *divided = map(_or_nan, own)
    return Exchange(size, hidden, last, Volumes(*divided))


def _exchange(own: Exchange) -> list[float]:
    return [own.gradient_bytes, own.hidden_part, own.last_bucket_bytes, *own.divided]


def _known(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _measured(body: dict[str, Any]) -> Measured:
    width = max((len(one) for one in body["types"]), default=1)
    return Measured(
        setups=SetupArrays.of(
            body["workloads"],
            body["types"],
            batch=np.array(body["batch"], dtype=float).reshape(-1, width),
            layout=np.array(body["layout"], dtype=float).reshape(-1, width),
            accumulation=np.array(body["accumulation"], dtype=float),
        ),
        log_step=np.array(body["log_step"], dtype=float),
        weight=np.array(body["weight"], dtype=float),
        run_sd=body["run_sd"],
        probes=pd.DataFrame(body["probes"]["data"], columns=body["probes"]["columns"]),
        profiled=tuple(body["profiled"]),
    )


def _ran(rows: dict[str, list[list[float]]]) -> dict[str, tuple[Ran, ...]]:
    """Models before sharding know of no ranks that share."""
    return {
        name: tuple((one[0], one[1], one[2] if len(one) > 2 else 1.0) for one in own)
        for name, own in rows.items()
    }
