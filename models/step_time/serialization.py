"""Convert the step-time model to JSON text and back without loss: floats keep every bit."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from ..domain.categorical import Keys
from .dataset import Exchange
from .input import Loaders
from .machine_specs import Machine
from .memory import Held, MemoryModel
from .model import Measured, StepTimeModel, lay_out
from .one_device import OneDevice, Points
from .rows import SetupFacts
from .setup_arrays import SetupArrays
from .tensor import Volumes

_DATACLASSES = {
    one.__name__: one
    for one in (
        *(Exchange, SetupFacts, Loaders, Machine, Measured, MemoryModel, OneDevice, Points),
        *(SetupArrays, StepTimeModel),
    )
}
_SEQUENCES: dict[str, Any] = {
    "tuple": tuple,
    "frozenset": frozenset,
    "Held": lambda values: Held(*values),
    "Volumes": lambda values: Volumes(*values),
}


class NotAModel(ValueError):
    """Raised if a text does not contain a step-time model."""


def dump(model: StepTimeModel) -> str:
    """Return the model as JSON text."""
    bare = replace(model, regression=None)  # type: ignore[arg-type]
    return json.dumps({"model": _plain(bare), "learned": _plain(model.regression.learned())})


def load(text: str) -> StepTimeModel:
    """Return the model in `text`.

    Raises:
        NotAModel: if the JSON is not a step-time model.
    """
    body = json.loads(text)
    if not isinstance(body, dict) or "learned" not in body:
        raise NotAModel("not a step-time model")
    bare: StepTimeModel = _value(body["model"])
    regression = lay_out(bare.facts, bare.measured)
    regression.restore(_value(body["learned"]))
    return replace(bare, regression=regression)


def _plain(value: Any) -> Any:
    """Convert `value` to a JSON value. Arrays, frames and dataclasses become [type, content]."""
    if isinstance(value, np.ndarray):
        return ["array", [value.dtype.str, value.shape, value.ravel().tolist()]]
    if isinstance(value, pd.DataFrame):
        return ["frame", _plain({str(name): own.to_numpy() for name, own in value.items()})]
    if isinstance(value, Keys):
        return ["keys", list(value)]
    if is_dataclass(value):
        parts = {one.name: getattr(value, one.name) for one in fields(value)}
        return [type(value).__name__, _plain(parts)]
    if isinstance(value, dict):
        return ["dict", [[_plain(key), _plain(own)] for key, own in value.items()]]
    if isinstance(value, (tuple, frozenset)):
        items = sorted(value) if isinstance(value, frozenset) else value
        return [type(value).__name__, [_plain(one) for one in items]]
    return value


def _value(plain: Any) -> Any:
    """Convert the result of `_plain` back to the value."""
    if not isinstance(plain, list):
        return plain
    kind, content = plain
    if kind == "array":
        dtype, shape, values = content
        return np.array(values, dtype=dtype).reshape(shape)
    if kind == "frame":
        return pd.DataFrame(_value(content))
    if kind == "keys":
        return Keys.of(content)
    if kind == "dict":
        return {_value(key): _value(own) for key, own in content}
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([_value(one) for one in content])
    return _DATACLASSES[kind](**_value(content))
