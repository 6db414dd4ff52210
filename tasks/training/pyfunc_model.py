"""The model class that MLflow stores with each version and runs in the puller's program.

`srift_models` is a copy of the room `models` that travels with the version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from mlflow.pyfunc.model import PythonModel


class StepTime(PythonModel):
    """Predict step times: setups in, seconds with a 90 % interval and the bottleneck out."""

    def load_context(self, context: Any) -> None:
        from srift_models.step_time.serialization import load

        self.model = load(Path(context.artifacts["model"]).read_text())

    def predict(
        self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Return one row per setup, in order. Raises ValueError on an unknown name."""
        predicted: pd.DataFrame = self.model.predict(model_input)
        return predicted


mlflow.models.set_model(StepTime())
