"""Measurement rows and workload facts from files (CSV or Parquet), in the columns of the design's contract.

Reads and refuses; never stores. A bad row is named by line, column and reason; one bad row refuses the file.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from models.cloud import parse_cluster, parse_numbers

from .installation import PROVIDERS
from .nearest import nearest

_SHOWN = 20
_Row = TypeVar("_Row", bound=BaseModel)


class ImportRefused(Exception):
    """A file cannot be taken as measurements; nothing of it was loaded. `problems` has one sentence a bad row."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.problems = problems
        shown = "\n".join(f"  {problem}" for problem in problems[:_SHOWN])
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        super().__init__(f"{path} was refused and nothing of it loaded:\n{shown}{more}")


def _text(value: Any) -> Any:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _whole(value: Any) -> Any:
    """Whole numbers may be written 1.09e8."""
    return int(float(value)) if isinstance(value, str) and float(value).is_integer() else value


Text = Annotated[str, BeforeValidator(_text), Field(min_length=1)]
Whole = Annotated[int, BeforeValidator(_whole), Field(ge=1)]


class Measurement(BaseModel):
    """One measured step time, in the columns of the design's measurement rows. None is unknown."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="forbid")

    workload: Text
    cluster: Text
    batch_per_device: Text
    step_s: float = Field(gt=0)
    layout: Text | None = None
    accumulation_steps: Whole = 1
    strategy: Text = "ddp"
    precision: Text = "fp32"
    sync_s: float | None = Field(default=None, ge=0)
    provider: Text = "ec2"
    gradient_bytes: Whole | None = None
    parameters: Whole | None = None
    flops_per_sample: float | None = Field(default=None, gt=0)
    market: Text | None = None
    zone: Text | None = None
    run_id: Text | None = None
    source: Text | None = None
    measured_at: datetime | None = None

    @field_validator("cluster")
    @classmethod
    def _a_cluster(cls, text: str) -> str:
        parse_cluster(text)
        return text

    @field_validator("provider")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in PROVIDERS:
            raise ValueError(f"unknown provider {name!r}; {nearest(name, PROVIDERS)}")
        return name

    @field_validator("batch_per_device", "layout")
    @classmethod
    def _one_an_instance(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is None or "cluster" not in info.data:
            return text
        numbers = parse_numbers(text, len(parse_cluster(info.data["cluster"])), str(info.field_name))
        return str(numbers[0]) if "+" not in text else "+".join(str(number) for number in numbers)

    @field_validator("measured_at")
    @classmethod
    def _in_utc(cls, moment: datetime | None) -> datetime | None:
        return moment.astimezone(UTC).replace(tzinfo=None) if moment and moment.tzinfo else moment


class Facts(BaseModel):
    """What `--workloads` says of one workload."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="forbid")

    workload: Text
    parameters: Whole
    gradient_bytes: Whole
    flops_per_sample: float | None = Field(default=None, gt=0)
    samples: Whole | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """A sound file: its digest, its rows with where they stood, their identities, and columns that were ignored."""

    file_digest: str
    rows: tuple[Measurement, ...]
    places: tuple[int, ...]
    identities: tuple[str, ...]
    ignored: tuple[str, ...]

    def frame(self) -> pd.DataFrame:
        """The rows as the mart `runs` has them, in file order: for a backtest without a warehouse."""
        frame = pd.DataFrame([row.model_dump() for row in self.rows], columns=list(Measurement.model_fields))
        frame["run_id"] = list(self.identities)
        frame["step_spread"] = float("nan")
        return frame


def read_measurements(path: Path) -> Measurements:
    """The rows of a CSV or Parquet file of measurements. Raises ImportRefused naming every bad row."""
    rows: list[Measurement] = []
    places: list[int] = []
    ignored = _check_columns(path, Measurement)
    for place, row in _validated(path, Measurement, ignored):
        rows.append(row)
        places.append(place)
    return Measurements(
        file_digest=hashlib.sha256(path.read_bytes()).hexdigest()[:16],
        rows=tuple(rows),
        places=tuple(places),
        identities=_identities(path, rows, places),
        ignored=tuple(sorted(ignored)),
    )


def read_facts(path: Path) -> list[dict[str, Any]]:
    """The rows of a `--workloads` file, unknown facts left out. Raises ImportRefused."""
    return [row.model_dump(exclude_none=True) for row in read_descriptions(path, Facts, key="workload")]


def read_descriptions(path: Path, kind: type[_Row], *, key: str) -> list[_Row]:
    """The rows of a file that describes each `key` once. Raises ImportRefused."""
    rows = [row for _, row in _validated(path, kind, _check_columns(path, kind))]
    twice = [name for name, count in Counter(getattr(row, key) for row in rows).items() if count > 1]
    if twice:
        raise ImportRefused(path, [f"column {key}: {name!r} stands more than once" for name in twice])
    return rows


def _check_columns(path: Path, kind: type[BaseModel]) -> set[str]:
    """Columns to ignore. Raises ImportRefused where a required one is missing or one looks like a misspelt one."""
    columns = [name for name in _columns(path) if name]
    known = list(kind.model_fields)
    problems = [
        f"there is no column {name!r}"
        for name, field in kind.model_fields.items()
        if field.is_required() and name not in columns
    ]
    ignored = set(columns) - set(known)
    for name in sorted(ignored):
        near = difflib.get_close_matches(name.strip().lower(), known, n=1, cutoff=0.85)
        if near:
            problems.append(f"column {name!r} is not known: did you mean {near[0]!r}?")
    if problems:
        raise ImportRefused(path, problems)
    return ignored


def _validated(path: Path, kind: type[_Row], ignored: set[str]) -> Iterator[tuple[int, _Row]]:
    problems: list[str] = []
    word = "row" if is_parquet(path) else "line"
    for place, raw in _raw_rows(path):
        if None in raw:
            problems.append(f"{word} {place}: more values than the header has columns")
            continue
        given = {key: value for key, value in raw.items() if key not in ignored and not _absent(value)}
        try:
            row = kind.model_validate(given)
        except ValidationError as error:
            for one in error.errors(include_url=False):
                got = "" if one["type"] == "missing" else f" (it says {str(given.get(str(one['loc'][0])))!r})"
                reason = "is empty" if one["type"] == "missing" else one["msg"].removeprefix("Value error, ")
                problems.append(f"{word} {place}, column {one['loc'][0]}: {reason}{got}")
            continue
        if not problems:
            yield place, row
    if problems:
        raise ImportRefused(path, problems)


def _identities(path: Path, rows: list[Measurement], places: list[int]) -> tuple[str, ...]:
    """`run_id`, else a digest of the row's content and occurrence. One run_id with two contents is bad."""
    seen: Counter[str] = Counter()
    named: dict[str, tuple[str, int]] = {}
    identities: list[str] = []
    problems: list[str] = []
    word = "row" if is_parquet(path) else "line"
    for row, place in zip(rows, places, strict=True):
        content = json.dumps(row.model_dump(mode="json"), sort_keys=True)
        if row.run_id is not None:
            first, where = named.setdefault(row.run_id, (content, place))
            if first != content:
                problems.append(
                    f"{word} {place}, column run_id: {row.run_id!r} stands on {word} {where} with other values"
                )
            identities.append(row.run_id)
            continue
        seen[content] += 1
        identities.append(hashlib.sha256(f"{content}#{seen[content]}".encode()).hexdigest()[:20])
    if problems:
        raise ImportRefused(path, problems)
    return tuple(identities)


def is_parquet(path: Path) -> bool:
    """Is the file taken for Parquet, by its name?"""
    return path.suffix.lower() in (".parquet", ".pq")


def _columns(path: Path) -> list[str]:
    if path.exists() and not path.is_file():  # a pipe is empty once it was read, and the file is read more than once
        raise ImportRefused(path, ["it is not a regular file"])
    try:
        if is_parquet(path):
            return list(pq.read_schema(path).names)
        with path.open(newline="", encoding="utf-8-sig") as file:
            return next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        raise ImportRefused(path, [f"it cannot be read: {error}"]) from error


def _raw_rows(path: Path) -> Iterator[tuple[int, dict[Any, Any]]]:
    """Each row with its place: the line of a CSV (its header is line 1), the row of a Parquet file from 1."""
    try:
        if is_parquet(path):
            yield from enumerate(pq.read_table(path).to_pylist(), start=1)
            return
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            for row in reader:
                yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        raise ImportRefused(path, [f"it cannot be read: {error}"]) from error


def _absent(value: Any) -> bool:
    return value is None or value != value or (isinstance(value, str) and not value.strip())
