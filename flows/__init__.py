"""What happens, in what order, on which clock. Reads as a story; no logic."""

import os

# Before Prefect and MLflow are imported: nothing of what runs here is reported to anybody.
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # not among what a command says
# Where tqdm is installed MLflow draws bars for files of kilobytes among what a command says.
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
