"""Define the Prefect flows and the command line. The package `tasks` contains their logic."""

import os

# Prefect and MLflow read these variables when they are imported.
_DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # Prefect's default of 20 s is too short on a busy machine.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_TASKS_DEFAULT_NO_CACHE": "true",  # arguments are large, and their state changes
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
for name, value in _DEFAULTS.items():
    os.environ.setdefault(name, value)
