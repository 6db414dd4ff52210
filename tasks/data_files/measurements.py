"""Measurement rows and descriptions from CSV or Parquet files, in the columns of docs/data-files.md.

One bad row refuses the file, and is named by line (or row), column and reason.
"""

from __future__ import annotations

import csv
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
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

from models.domain.cluster import parse_cluster, parse_numbers
from models.domain.suggestions import NAME_RULE, plain_name
from models.domain.workload import MODES, PRECISIONS, STRATEGIES, SWITCHES, Mode
from warehouse.append import Connection
from warehouse.imports import (
    COLUMNS,
    bad_rows,
    distinct_setups,
    scratch,
    stage_rows,
    stage_texts,
    staged_frame,
)

from ..workspace.workspace import PROVIDERS

_SAME_PRECISION = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
_SHOWN = 20
_CHUNK_ROWS = 50_000
_AHEAD = timedelta(days=1)  # a time without a zone may come from a zone ahead of UTC
_Described = TypeVar("_Described", bound=BaseModel)


class ImportRefused(Exception):
    """A file was refused, and nothing of it was loaded. `problems` has a sentence for each bad row."""

    def __init__(self, path: Path, problems: Sequence[str], *, hint: str = "") -> None:
        self.problems = list(problems)
        lines = [f"{path} was refused, and nothing of it was loaded:", *self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            lines.append(f"and {len(self.problems) - _SHOWN} more")
        super().__init__("\n  ".join(lines) + (f"\n{hint}" if hint else ""))


def _whole(value: Any) -> Any:
    """Accept whole numbers written as 1.09e8."""
    return int(float(value)) if isinstance(value, str) and float(value).is_integer() else value


Text = Annotated[str, Field(min_length=1)]
Whole = Annotated[int, BeforeValidator(_whole), Field(ge=1, lt=2**63)]


class Measurement(BaseModel):
    """The setup of a measured row. None is unknown."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    workload: Text
    cluster: Text
    batch_per_device: Text
    layout: Text | None = None
    accumulation_steps: Annotated[Whole, Field(lt=2**31)] = 1
    precision: Text = PRECISIONS[0]
    strategy: Text = STRATEGIES[0]
    switches: Text = SWITCHES[0]
    provider: Text = "ec2"
    gradient_bytes: Whole | None = None
    parameters: Whole | None = None
    flops_per_sample: float | None = Field(default=None, gt=0)
    market: Text | None = None
    zone: Text | None = None
    source: Text | None = None

    @field_validator("workload")
    @classmethod
    def _name(cls, name: str) -> str:
        if not plain_name(name):
            raise ValueError(NAME_RULE.format(name=name))
        return name

    @field_validator("cluster")
    @classmethod
    def _cluster(cls, text: str) -> str:
        parse_cluster(text)
        return text

    @field_validator("batch_per_device", "layout")
    @classmethod
    def _number_for_each_instance(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is None or "cluster" not in info.data:
            return text
        count = len(parse_cluster(info.data["cluster"]))
        numbers = parse_numbers(text, count, str(info.field_name))
        return "+".join(map(str, numbers if "+" in text else numbers[:1]))

    @field_validator("precision")
    @classmethod
    def _precision(cls, name: str) -> str:
        return _known(_SAME_PRECISION.get(name.lower(), name.lower()), PRECISIONS)

    @field_validator("provider")
    @classmethod
    def _provider(cls, name: str) -> str:
        return _known(name, PROVIDERS)

    @field_validator("strategy")
    @classmethod
    def _strategy(cls, name: str, info: ValidationInfo) -> str:
        mode = Mode(strategy=_known(name.lower(), STRATEGIES))
        cluster, layout = info.data.get("cluster"), info.data.get("layout")
        if cluster and layout and mode.of_several:
            devices = np.array(parse_numbers(layout, len(parse_cluster(cluster)), "layout"))
            sizes = (len(devices), devices.min(), devices.max(), devices.sum())
            if not mode.runs_on(*(np.array([size]) for size in sizes))[0]:
                raise ValueError(f"{mode.strategy} cannot train on {layout} devices of {cluster}")
        return mode.strategy

    @field_validator("switches")
    @classmethod
    def _switches(cls, joined: str, info: ValidationInfo) -> str:
        names = set(joined.lower().split("+"))
        ordered = next((one for one in SWITCHES if set(one.split("+")) == names), joined)
        strategy = info.data.get("strategy", STRATEGIES[0])
        if Mode(strategy=strategy, switches=_known(ordered, SWITCHES)) not in MODES:
            raise ValueError(f"{ordered} does not go with {strategy}")
        return ordered


def _known(name: str, names: Iterable[str]) -> str:
    if name not in names:
        raise ValueError(f"unknown; known: {', '.join(names)}")
    return name


class Facts(BaseModel):
    """The columns of a `--workloads` file."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    workload: Text
    parameters: Whole
    gradient_bytes: Whole
    flops_per_sample: float | None = Field(default=None, gt=0)
    samples: Whole | None = None

    _name = field_validator("workload")(Measurement._name.__func__)  # type: ignore[attr-defined]


def stage_measurements(connection: Connection, path: Path, now: datetime) -> list[str]:
    """Read a file into the temporary table `staged` of `connection`; returns its unknown columns.

    Raises ImportRefused naming every bad row.
    """
    table = read_table(path)
    ignored = _check_columns(path, table, Measurement, required=("step_s",), known=COLUMNS)
    stage_texts(connection, table)
    word = row_word(path)
    setups, problems = [], []
    for texts in distinct_setups(connection):
        place = f"{word} {texts['place']}"
        if texts["rows"] > 1:
            place += f" and {texts['rows'] - 1} more"
        row, wrong = _validated(Measurement, texts)
        problems += [f"{place}, {problem}" for problem in wrong]
        if row is not None:
            setups.append(row.model_dump() | {"setup": texts["setup"]})
    stage_rows(connection, setups)
    problems += [
        f"{word} {place}, column {column}: {text!r} {rule}"
        for place, column, text, rule in bad_rows(connection, now + _AHEAD)
    ]
    if problems:
        raise ImportRefused(path, problems)
    return ignored


def read_frame(path: Path) -> tuple[pd.DataFrame, list[str]]:
    """Return the file's rows as the mart `runs` has them, and its unknown columns.

    Raises ImportRefused.
    """
    with scratch() as connection:
        ignored = stage_measurements(connection, path, datetime.now(UTC))
        return staged_frame(connection).assign(step_spread=float("nan")), ignored


def read_descriptions(
    path: Path, kind: type[_Described], *, key: str
) -> tuple[list[_Described], list[str]]:
    """Return the rows of a file that describes each `key` once, and its unknown columns.

    Raises ImportRefused.
    """
    table = read_table(path)
    ignored = _check_columns(path, table, kind)
    rows, problems = [], []
    for texts in table.to_pylist():
        row, wrong = _validated(kind, texts)
        problems += [f"{row_word(path)} {texts['place']}, {problem}" for problem in wrong]
        rows += [row] if row is not None else []
    counts = Counter(getattr(row, key) for row in rows)
    problems += [f"column {key}: {name!r} is repeated" for name, n in counts.items() if n > 1]
    if problems:
        raise ImportRefused(path, problems)
    return rows, ignored


def read_facts(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a `--workloads` file without unknown facts. Raises ImportRefused."""
    rows, _ = read_descriptions(path, Facts, key="workload")
    return [row.model_dump(exclude_none=True) for row in rows]


def _check_columns(
    path: Path,
    table: pa.Table,
    kind: type[BaseModel],
    required: Sequence[str] = (),
    known: Iterable[str] = (),
) -> list[str]:
    """Return the columns that are not known. Raises ImportRefused if a required column is missing."""
    columns = table.column_names
    fields = kind.model_fields
    needed = [*(name for name, field in fields.items() if field.is_required()), *required]
    problems = [f"there is no column {name!r}" for name in needed if name not in columns]
    problems += [f"column {name!r} is repeated" for name in fields if columns.count(name) > 1]
    if problems:
        raise ImportRefused(path, problems, hint=f"its columns are {', '.join(columns[:-1])}")
    return sorted(set(columns) - set(fields) - set(known) - {"place"})


def _validated(
    kind: type[_Described], texts: Mapping[str, Any]
) -> tuple[_Described | None, list[str]]:
    """Return the row, or None and a sentence for each bad column."""
    given = {
        name: value.strip() if isinstance(value, str) else value
        for name, value in texts.items()
        if name in kind.model_fields and value == value and value not in (None, "")
    }
    try:
        return kind.model_validate(given), []
    except ValidationError as error:
        return None, [
            f"column {one['loc'][0]}: {texts.get(str(one['loc'][0]))!r}: {one['msg']}"
            for one in error.errors(include_url=False)
        ]


def read_table(path: Path) -> pa.Table:
    """Return a file's columns and `place`: the line of a CSV (its header is line 1), or the row.

    Raises ImportRefused if the file cannot be read.
    """
    try:
        if is_parquet(path):
            table = pq.read_table(path)
            return table.append_column("place", pa.array(range(1, len(table) + 1)))
        with path.open(newline="", encoding="utf-8-sig") as file:
            return pa.concat_tables(_csv_chunks(path, file))
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        raise ImportRefused(path, [f"it cannot be read: {error}"]) from error


def _csv_chunks(path: Path, lines: Iterable[str]) -> Iterator[pa.Table]:
    reader = csv.reader(lines)
    names = [name.strip() for name in next(reader, [])]
    schema = pa.schema([*((name, pa.string()) for name in names), ("place", pa.int64())])
    rows: list[list[Any]] = []
    for row in reader:
        if len(row) > len(names):
            raise ImportRefused(path, [f"line {reader.line_num}: more values than columns"])
        if row:
            rows.append([*row, *[""] * (len(names) - len(row)), reader.line_num])
        if len(rows) == _CHUNK_ROWS:
            yield _table(rows, schema)
            rows = []
    yield _table(rows, schema)


def _table(rows: list[list[Any]], schema: pa.Schema) -> pa.Table:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [pa.array(values, kind) for values, kind in zip(columns, schema.types, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def ignored_columns(names: Iterable[str]) -> list[str]:
    """A sentence for each unknown column of a file."""
    return [f"column {name!r} is unknown and was ignored" for name in names]


def digest_of_file(path: Path) -> str:
    """Sixteen hex digits of the file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def is_parquet(path: Path) -> bool:
    return path.suffix.lower() in (".parquet", ".pq")


def row_word(path: Path) -> str:
    """The word for a place in the file."""
    return "row" if is_parquet(path) else "line"
