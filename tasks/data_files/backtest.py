"""Run `srift backtest`: fit a model to a file, predict another file, and report the errors."""

from pathlib import Path
from typing import Any

import pandas as pd

from models.domain.setup_table import rows_of
from models.monitoring import backtest as pure
from models.step_time.dataset import TrainingData
from warehouse.export import write_whole

from .catalogue import read_catalogue
from .file_reader import ImportRefused, read_facts, read_frame, read_table

SEED = 0


def backtest(
    train: Path,
    test: Path,
    *,
    workloads: Path | None,
    catalogue: Path | None,
    predictions: Path | None,
) -> dict[str, Any]:
    """Fit a model to the file `train`, predict the file `test`, and report the errors.

    workloads: file with facts of workloads, such as parameters and FLOPs.
    catalogue: file of instance types.
    predictions: file to which the rows of `test` are written with their predictions.

    Keys of the result:

        provider: "local" or "ec2", the provider of all rows.
        rows: number of rows in the test file.
        predicted: number of rows that could be predicted.
        summary: one row per workload, then one row per number of instances, then a row for the
            whole file. A row has prediction errors and the coverage of the 90 % intervals.
        sentences: warnings.

    Raises:
        ImportRefused: if an input file is refused.
        OSError: if `predictions` cannot be written or is one of the input files.
    """
    inputs = [path.resolve() for path in (train, test, workloads, catalogue) if path]
    if predictions and predictions.resolve() in inputs:
        raise OSError(f"{predictions} is an input file: name another file for the predictions")
    train_runs, frame = read_frame(train), read_frame(test)
    provider, *others = {*train_runs["provider"], *frame["provider"]}
    if others:
        problem = f"all rows of this file and of {test} must belong to the same provider"
        raise ImportRefused(train, [problem])
    empty = pd.DataFrame()
    data = TrainingData(
        runs=train_runs,
        profiles=empty,
        buckets=empty,
        probes=empty,
        workloads=pd.DataFrame(read_facts(workloads) if workloads else []),
        instance_types=read_catalogue(catalogue),
    )
    try:
        predicted = pure.backtest(data, frame, seed=SEED)
    except ValueError as error:
        raise ImportRefused(train, [f"no model can be fitted to this file: {error}"]) from error
    if predictions:
        columns = list(pure.PREDICTED)
        rows = read_table(test).drop_columns("place").to_pandas()
        rows = rows.drop(columns=columns, errors="ignore").assign(**predicted[columns])
        write_whole(predictions, rows.to_csv(index=False, float_format="%.8g"))
    return {
        "provider": provider,
        "rows": len(frame),
        "predicted": int((predicted["unpredicted"] == "").sum()),
        "summary": rows_of(pure.summary(frame, predicted)),
        "sentences": pure.notes(data, frame, predicted),
    }
