"""Define the class through which MLflow loads a registered model in a user's program.

The package `srift_models` is a copy of `models`. MLflow stores the copy with each model version.
"""

from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
from mlflow.pyfunc.model import PythonModel


class StepTime(PythonModel):
    """The registered model, which predicts the seconds of a training step and its bottleneck."""

    def load_context(self, context: Any) -> None:
        from srift_models.step_time.serialization import load

        self.model = load(Path(context.artifacts["model"]).read_bytes())

    def predict(
        self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Return one row of predictions for each row of `model_input`, in the same order.

        A row describes a setup, by columns such as `workload`, `cluster` and `batch_per_device`.
        Raises ValueError if the model does not know a workload or an instance type.
        """
        predictions: pd.DataFrame = self.model.predict(model_input)
        terms = self.model.field_terms(model_input, predictions["step_s"].to_numpy())
        # `join` would repeat rows, because the input's index may have equal labels.
        return predictions.assign(**{name: terms[name].to_numpy() for name in terms})


mlflow.models.set_model(StepTime())
