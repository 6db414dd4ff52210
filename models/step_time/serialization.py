"""Convert the step-time model to bytes and back without loss."""

import io
import pickle
from typing import Any

from .model import StepTimeModel

# A model in the registry comes with a copy of the package `models` under another name.
_ROOT = "models."
_PACKAGE = __name__.removesuffix("step_time.serialization")
# The names that a stored model may load in addition to the classes of `models`. Other names are
# refused, because a pickle can call any function.
_LOADED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
}


class NotAModel(ValueError):
    """Raised if stored bytes are not a step-time model."""


class _Unpickler(pickle.Unpickler):
    """An unpickler that loads only numpy arrays and classes of the package `models`.

    A pickle with anything else is refused, because it could call any function.
    """

    def find_class(self, module: str, name: str) -> Any:
        ours = module.startswith(_ROOT) and "." not in name
        if not ours and (module, name) not in _LOADED:
            raise pickle.UnpicklingError(
                f"the stored model contains {module}.{name}, which Srift refuses to load"
            )
        module = _PACKAGE + module.removeprefix(_ROOT) if ours else module
        found = super().find_class(module, name)
        if ours and not (isinstance(found, type) and found.__module__ == module):
            raise pickle.UnpicklingError(f"{module}.{name} in the stored model is not a class")
        return found


def dump(model: StepTimeModel) -> bytes:
    return pickle.dumps(model)


def load(stored: bytes) -> StepTimeModel:
    """Return a stored model.

    Raises:
        NotAModel: if the bytes are not a step-time model.
    """
    try:
        model = _Unpickler(io.BytesIO(stored)).load()
    except Exception as error:  # damaged bytes raise nearly any exception
        raise NotAModel("the bytes cannot be read as a step-time model") from error
    if not isinstance(model, StepTimeModel):
        raise NotAModel("the bytes hold an object that is not a step-time model")
    return model
