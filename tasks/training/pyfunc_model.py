"""What MLflow stores with each version and runs in the puller's program: loads the model's JSON, answers frames.

It sees neither this project nor torch: `srift_models` is a copy of the `models` room that travels with the version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from mlflow.pyfunc.model import PythonModel


class StepTime(PythonModel):
    """Step times of setups: measurement columns in, seconds with a 90 % interval and the bottleneck out."""

    def load_context(self, context: Any) -> None:
        """Read the fitted model from the version's artifacts."""
        from srift_models.step_time.serialization import load

        self.model = load(Path(context.artifacts["model"]).read_text())

    def predict(
        self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """One row a setup, in the order given. Raises ValueError on an unknown workload or instance type."""
        predicted: pd.DataFrame = self.model.predict(model_input)
        return predicted


mlflow.models.set_model(StepTime())
