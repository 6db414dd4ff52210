"""`srift backtest`: two files in, a report and a file of predictions out. No warehouse is opened or made."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import pandas as pd
import pyarrow.parquet as pq

from models.monitoring import backtest as pure
from models.step_time.dataset import TrainingData

from .catalogue import COLUMNS, read_catalogue
from .measurements import ImportRefused, ignored_columns, is_parquet, read_facts, read_measurements

SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Rows of the test file and how many were predicted; `summary` as the pure one has it; warnings."""

    provider: str
    rows: int
    predicted: int
    summary: pd.DataFrame
    sentences: tuple[str, ...]

    @property
    def headline(self) -> str:
        """What was predicted, and how to read the summary."""
        return (
            f"{self.predicted} of {self.rows} rows predicted ({self.provider}); errors are |predicted - measured| "
            "over measured,\ncoverage the part inside the 50, 80 and 90 % intervals, width that of 90 % over predicted"
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values; errors, coverage and width are parts of one."""
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
    """Fit on `train`, predict `test`, and write `predictions` where given: the test rows with what was predicted.

    Raises ImportRefused on a file that cannot be taken, and OSError where `predictions` cannot be written; then
    `predictions` is as it was.
    """
    inputs = [one for one in (train, test, workloads, catalogue) if one is not None]
    with ExitStack() as stack:
        out = None if predictions is None else stack.enter_context(_replaced(predictions, inputs))
        (known, ignored), (frame, ignored_of_test) = _read(train), _read(test)
        provider = _one_provider({train: known, test: frame})
        data = _training_data(known, workloads, catalogue)
        try:
            predicted = pure.backtest(data, frame, seed=SEED)
        except ValueError as error:
            raise ImportRefused(train, [f"nothing can be fitted to it: {error}"]) from error
        if out is not None:
            _write(out, test, predicted)
    return Report(
        provider=provider,
        rows=len(frame),
        predicted=int((predicted["unpredicted"] == "").sum()),
        summary=pure.summary(frame, predicted),
        sentences=(
            *_ignored(train, ignored),
            *_ignored(test, ignored_of_test),
            *pure.notes(data, frame, predicted),
        ),
    )


def read_training(
    file: Path, *, workloads: Path | None, catalogue: Path | None
) -> tuple[TrainingData, dict[str, int]]:
    """The rows of `file` with the facts of its workloads and types, and devices by described instance type.

    Raises ImportRefused on a file that cannot be taken.
    """
    runs, _ = _read(file)
    _one_provider({file: runs})
    data = _training_data(runs, workloads, catalogue)
    if "gradient_bytes" in data.workloads:
        known = data.runs["workload"].map(data.workloads.set_index("workload")["gradient_bytes"])
        data.runs["gradient_bytes"] = data.runs["gradient_bytes"].astype(float).fillna(known)
    kinds = data.instance_types[data.instance_types["devices"].notna()]
    return data, {
        str(name): int(one) for name, one in zip(kinds["name"], kinds["devices"], strict=True)
    }


def _read(path: Path) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The rows as the mart `runs` has them, and the columns that were ignored."""
    with read_measurements(path) as measured:
        return measured.frame(), measured.ignored


def _training_data(
    runs: pd.DataFrame, workloads: Path | None, catalogue: Path | None
) -> TrainingData:
    return TrainingData(
        runs=runs,
        **{name: pd.DataFrame() for name in ("profiles", "buckets", "probes")},
        workloads=pd.DataFrame(read_facts(workloads) if workloads else []),
        instance_types=read_catalogue(catalogue)
        if catalogue
        else pd.DataFrame(columns=list(COLUMNS)),
    )


def _one_provider(files: dict[Path, pd.DataFrame]) -> str:
    met: set[str] = set()
    for path, runs in files.items():
        if not len(runs):
            raise ImportRefused(path, ["it has no row"])
        met |= set(runs["provider"])
        if len(met) > 1:
            raise ImportRefused(
                path,
                [
                    f"rows of several providers are never pooled: {', '.join(sorted(met))}; give those of one"
                ],
            )
    return met.pop()


def _ignored(path: Path, ignored: tuple[str, ...]) -> list[str]:
    others = [name for name in ignored if name not in pure.PREDICTED]
    again = len(others) < len(ignored)
    sentences = [f"{path.name}: {sentence}" for sentence in ignored_columns(others)]
    return [
        *sentences,
        *([f"{path.name}: its earlier predictions were not looked at"] if again else []),
    ]


@contextmanager
def _replaced(path: Path, inputs: list[Path]) -> Iterator[TextIO]:
    """A file beside `path` that takes its place at the end, and vanishes on an error. Raises OSError at once."""
    target = Path(os.path.realpath(path))
    refusal = ""
    if is_parquet(path):
        refusal = "they are written as CSV: name it so"
    elif target in {Path(os.path.realpath(one)) for one in inputs}:
        refusal = "it is one of the files to read"
    elif target.exists() and not (target.is_file() and os.access(target, os.W_OK)):
        refusal = "it is not a file that can be replaced"
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if refusal:
            raise OSError(refusal)
        file = beside.open("w", newline="", encoding="utf-8")
    except OSError as error:
        raise OSError(
            f"predictions cannot be written to {path}: {error.strerror or error}. Nothing was fitted"
        ) from error
    try:
        with file:
            yield file
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def _write(out: TextIO, test: Path, predicted: pd.DataFrame) -> None:
    """The test file's rows as they stand, with the predictions after them; empty cells where there is none."""
    writer = csv.writer(out, lineterminator="\n")
    rows = _cells(test)
    header = next(rows)
    kept = [at for at, name in enumerate(header) if name not in pure.PREDICTED]
    writer.writerow([*(header[at] for at in kept), *pure.PREDICTED])
    seconds = predicted[list(pure.PREDICTED)].to_numpy(float).tolist()
    for row, three in zip(rows, seconds, strict=True):
        row += [""] * (len(header) - len(row))
        writer.writerow(
            [*(row[at] for at in kept), *("" if one != one else f"{one:.8g}" for one in three)]
        )


def _cells(path: Path) -> Iterator[list[str]]:
    """The header, then each row that `read_measurements` takes, as text."""
    if is_parquet(path):
        table = pq.read_table(path)
        yield list(table.column_names)
        for row in table.to_pylist():
            yield [_text(value) for value in row.values()]
        return
    with path.open(newline="", encoding="utf-8-sig") as file:
        yield from (row for row in csv.reader(file) if row)


def _text(value: Any) -> str:
    if value is None or value != value:
        return ""
    return value.isoformat() if isinstance(value, datetime) else str(value)
