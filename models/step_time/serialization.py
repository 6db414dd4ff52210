"""Convert the step-time model to bytes and back without loss."""

from __future__ import annotations

import io
import pickle
from typing import Any

from .model import StepTimeModel

# The registry stores a copy of the package `models` under another name.
_ROOT = "models."


class NotAModel(ValueError):
    """Raised if a file does not contain a step-time model."""


class _Unpickler(pickle.Unpickler):
    """Finds the classes of this package under the name by which it was imported."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(_ROOT):
            package = __name__.removesuffix("step_time.serialization")
            module = package + module.removeprefix(_ROOT)
        return super().find_class(module, name)


def dump(model: StepTimeModel) -> bytes:
    return pickle.dumps(model)


def load(stored: bytes) -> StepTimeModel:
    """Return a stored model.

    Raises:
        NotAModel: if the bytes are not a step-time model.
    """
    try:
        model = _Unpickler(io.BytesIO(stored)).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
        raise NotAModel("not a step-time model") from error
    if not isinstance(model, StepTimeModel):
        raise NotAModel("not a step-time model")
    return model
