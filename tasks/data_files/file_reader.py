"""Read measurements, and facts of workloads, from CSV or Parquet files (docs/data-files.md).

Facts are numbers such as parameters and FLOPs. A single bad value makes Srift refuse the whole
file. The error names the line (or row), the column and the reason for each bad value.
"""

import csv
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from models.domain.suggestions import NAME_PATTERN
from models.domain.workload import MODES, PRECISIONS, STRATEGIES
from warehouse.append import in_utc
from warehouse.database import Connection
from warehouse.import_columns import COLUMNS, Problem, problems, scratch, stage, staged_frame

from ..reporting.progress import reporter
from ..workspace.workspace import PROVIDERS

_SHOWN = 20  # maximum number of bad values in the message of an error
_EMPTY = ("", "None", "nan")  # texts of a missing value
_AHEAD = timedelta(days=1)  # a time without a zone may come from a zone ahead of UTC
_Described = TypeVar("_Described", bound=BaseModel)


class ImportRefused(Exception):
    """The file cannot be imported. `problems` has a sentence for each bad value."""

    exit_code = 1

    def __init__(self, path: Path, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        lines = [f"{path} was refused, and nothing of it was loaded:", *self.problems[:_SHOWN]]
        super().__init__("\n  ".join(lines))


# pydantic converts a whole float to an integer, but not a text such as `1.09e8`.
Whole = Annotated[
    int,
    BeforeValidator(lambda value: float(value) if isinstance(value, str) else value),
    Field(ge=1, lt=2**63),
]


class Facts(BaseModel):
    """The facts (parameters, FLOPs, ...) of a workload: a row of the file given by --workloads."""

    model_config = ConfigDict(allow_inf_nan=False)

    workload: str = Field(pattern=NAME_PATTERN)
    parameters: Whole
    gradient_bytes: Whole
    flops_per_sample: float | None = Field(default=None, gt=0)
    layers: Whole | None = None
    hidden: Whole | None = None
    sequence: Whole | None = None
    samples: Whole | None = None

    @field_validator("gradient_bytes")
    @classmethod
    def _plausible(cls, size: int, others: ValidationInfo) -> int:
        parameters = others.data.get("parameters", size)
        if not parameters <= size <= 16 * parameters:
            raise ValueError("must be 1 to 16 bytes for each trained parameter")
        return size


def stage_measurements(connection: Connection, path: Path, now: datetime) -> None:
    """Read a file into the temporary table `staged`.

    Raises ImportRefused if a required column is missing, a value is bad, or a measurement is dated
    more than a day after `now`.
    """
    table = read_table(path)
    required = ("workload", "cluster", "batch_per_device", "step_s")
    missing = [name for name in required if name not in table.column_names]
    if missing:
        raise ImportRefused(path, [f"there is no column {name!r}" for name in missing])
    _name_unknown_columns(path, table, COLUMNS)
    stage(connection, table)
    valid_values = {
        "precisions": list(PRECISIONS),
        "strategies": list(STRATEGIES),
        "modes": [f"{mode.strategy} {mode.switches}" for mode in MODES],
        "providers": list(PROVIDERS),
        "latest": in_utc(now + _AHEAD),
    }
    wrong = sentences(problems(connection, valid_values))
    if wrong:
        raise ImportRefused(path, wrong)


def read_frame(path: Path) -> pd.DataFrame:
    """Return the measurements in a CSV or Parquet file, with one row per run.

    Raises ImportRefused if a value is bad.
    """
    with scratch() as connection:
        stage_measurements(connection, path, datetime.now(UTC))
        return staged_frame(connection).assign(step_spread=float("nan"))


def read_descriptions(path: Path, kind: type[_Described]) -> list[_Described]:
    """Return the file's rows as instances of `kind`.

    kind: a pydantic model. Its first field identifies a row.

    Raises ImportRefused if a value is bad, or if the first field of two rows has the same value.
    """
    table, (key, *_) = read_table(path), kind.model_fields
    _name_unknown_columns(path, table, kind.model_fields)
    rows: list[_Described] = []
    problems: list[str] = []
    for texts in table.to_pylist():
        cells = {name: str(value).strip() for name, value in texts.items()}
        values = {name: text for name, text in cells.items() if text not in _EMPTY}
        try:
            rows.append(kind.model_validate(values))
        except ValidationError as error:
            problems += [
                f"line {texts['place']}, column {each['loc'][0]}:"
                f" {texts.get(str(each['loc'][0]))!r}: {each['msg'].removeprefix('Value error, ')}"
                for each in error.errors(include_url=False)
            ]
    counts = Counter(getattr(row, key) for row in rows)
    problems += [f"column {key}: {name!r} is repeated" for name, n in counts.items() if n > 1]
    if problems:
        raise ImportRefused(path, problems)
    return rows


def read_facts(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file with facts of workloads.

    Facts are numbers such as parameters and FLOPs. Empty facts are left out of a row.

    Raises ImportRefused if a value is bad or a workload is repeated.
    """
    return [row.model_dump(exclude_none=True) for row in read_descriptions(path, Facts)]


def _name_unknown_columns(path: Path, table: pa.Table, columns: Iterable[str]) -> None:
    """Print a warning if the table has columns that are not in `columns`."""
    if unknown := sorted(set(table.column_names) - {*columns, "place"}):
        reporter().say(f"{path.name}: unknown columns are ignored: {', '.join(unknown)}")


def read_table(path: Path) -> pa.Table:
    """Read a CSV or Parquet file, and add a column `place`.

    `place` is the line number in a CSV file (the header is line 1), or the row number in a Parquet
    file. The columns of a CSV file are read as text.

    Raises ImportRefused if the file cannot be read or has no rows, if a column name is repeated, or
    if a line has more values than the header.
    """
    try:
        if path.suffix.lower() in (".parquet", ".pq"):
            table = pq.read_table(path)
            table = table.append_column("place", pa.array(range(1, len(table) + 1)))
        else:
            table = _read_csv(path)
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        raise ImportRefused(path, [f"it cannot be read: {error}"]) from error
    counts = Counter(table.column_names)
    problems = [f"column {name!r} is repeated" for name, count in counts.items() if count > 1]
    if not len(table):
        problems.append("it has no rows")
    if problems:
        raise ImportRefused(path, problems)
    return table


def _read_csv(path: Path) -> pa.Table:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        names = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = names
        rows = [row | {"place": reader.line_num} for row in reader]
    if long := [row["place"] for row in rows if None in row]:
        raise ImportRefused(path, [f"line {line}: more values than columns" for line in long])
    schema = pa.schema([*((name, pa.string()) for name in names), ("place", pa.int64())])
    return pa.Table.from_pylist(rows, schema=schema)


def digest_of_file(path: Path) -> str:
    """Return sixteen hex digits of the SHA-256 of the file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def sentences(bad_values: Iterable[Problem]) -> list[str]:
    """Return a sentence for each problem in a CSV or Parquet file.

    For example: `line 3, column parameters: 'x' must be a whole number`. For a Parquet file, line 3
    means row 3.
    """
    return [
        f"line {place}, column {column}: {text!r} {rule}"
        for place, column, text, rule in bad_values
    ]
