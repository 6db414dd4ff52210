"""`srift backtest`: two files in, a report and a file of predictions out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from models.monitoring import backtest as pure
from models.step_time.dataset import TrainingData
from warehouse.export import write_whole

from .catalogue import COLUMNS, read_catalogue
from .measurements import ImportRefused, ignored_columns, read_facts, read_frame, read_table

SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Rows of the test file, how many were predicted, the summary table and warnings."""

    provider: str
    rows: int
    predicted: int
    summary: pd.DataFrame
    sentences: tuple[str, ...]

    @property
    def headline(self) -> str:
        return (
            f"{self.predicted} of {self.rows} rows predicted ({self.provider}); errors are"
            " |predicted - measured| over measured,\ncoverage is the share inside the 50, 80 and"
            " 90 % intervals"
        )

    def as_json(self) -> dict[str, Any]:
        counts = {"provider": self.provider, "rows": self.rows, "predicted": self.predicted}
        return counts | {
            "summary": self.summary.to_dict("records"),
            "sentences": list(self.sentences),
        }


def backtest(
    train: Path,
    test: Path,
    *,
    workloads: Path | None,
    catalogue: Path | None,
    predictions: Path | None,
) -> Report:
    """Fit on `train`, predict `test`, and write the test rows with `predictions` if given.

    Raises ImportRefused, and OSError if `predictions` cannot be written.
    """
    inputs = [path.resolve() for path in (train, test, workloads, catalogue) if path]
    if predictions and predictions.resolve() in inputs:
        raise OSError(f"{predictions} is a file to read: name another file for the predictions")
    (known, ignored), (frame, ignored_of_test) = read_frame(train), read_frame(test)
    provider = _one_provider({train: known, test: frame})
    data = _training_data(known, workloads, catalogue)
    try:
        predicted = pure.backtest(data, frame, seed=SEED)
    except ValueError as error:
        raise ImportRefused(train, [f"nothing can be fitted to it: {error}"]) from error
    if predictions:
        columns = list(pure.PREDICTED)
        rows = read_table(test).drop_columns("place").to_pandas()
        rows = rows.drop(columns=columns, errors="ignore").assign(**predicted[columns])
        write_whole(predictions, rows.to_csv(index=False, float_format="%.8g"))
    unknown = {train.name: ignored, test.name: set(ignored_of_test) - set(pure.PREDICTED)}
    return Report(
        provider=provider,
        rows=len(frame),
        predicted=int((predicted["unpredicted"] == "").sum()),
        summary=pure.summary(frame, predicted),
        sentences=(
            *(
                f"{name}: {one}"
                for name, columns in unknown.items()
                for one in ignored_columns(sorted(columns))
            ),
            *pure.notes(data, frame, predicted),
        ),
    )


def read_training(
    file: Path, *, workloads: Path | None, catalogue: Path | None
) -> tuple[TrainingData, dict[str, int]]:
    """Return the rows with facts of workloads and types, and the devices of each type.

    Raises ImportRefused.
    """
    runs, _ = read_frame(file)
    _one_provider({file: runs})
    data = _training_data(runs, workloads, catalogue)
    if "gradient_bytes" in data.workloads:
        known = data.runs["workload"].map(data.workloads.set_index("workload")["gradient_bytes"])
        data.runs["gradient_bytes"] = data.runs["gradient_bytes"].astype(float).fillna(known)
    devices = data.instance_types.set_index("name")["devices"].dropna()
    return data, {str(name): int(count) for name, count in devices.items()}


def _training_data(
    runs: pd.DataFrame, workloads: Path | None, catalogue: Path | None
) -> TrainingData:
    return TrainingData(
        runs=runs,
        profiles=pd.DataFrame(),
        buckets=pd.DataFrame(),
        probes=pd.DataFrame(),
        workloads=pd.DataFrame(read_facts(workloads)[0] if workloads else []),
        instance_types=read_catalogue(catalogue)
        if catalogue
        else pd.DataFrame(columns=list(COLUMNS)),
    )


def _one_provider(files: dict[Path, pd.DataFrame]) -> str:
    providers: set[str] = set()
    for path, runs in files.items():
        providers |= set(runs["provider"])
        if len(runs) == 0 or len(providers) > 1:
            raise ImportRefused(
                path, [f"it needs rows of one provider, not of {sorted(providers)}"]
            )
    return providers.pop()
