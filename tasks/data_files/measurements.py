"""Measurement rows and workload facts from files (CSV or Parquet), in the columns of the design's contract.

Reads and refuses; never stores. A bad row is named by line, column and reason; one bad row refuses the file.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, compress, repeat
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from models.domain.cluster import parse_cluster, parse_numbers
from models.domain.suggestions import nearest_names
from models.domain.workload import MODES, PRECISIONS, STRATEGIES, SWITCHES, TABLES, Mode
from warehouse.append import in_utc
from warehouse.imports import CHUNK, StagedRows, staged

from ..workspace.workspace import PROVIDERS

# Columns that came after the first imports: where they say what is usual, rows have the digests that they always had.
_SINCE = ("switches",)

_SAME_PRECISION = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}
_INVISIBLE = {
    "Cc",
    "Cf",
    "Zl",
    "Zp",
}  # Unicode's control and format characters, and breaks of lines
_SEPARATORS = {";": "';'", "\t": "a tab", "|": "'|'"}
_SHOWN = 20
_Row = TypeVar("_Row", bound=BaseModel)


class ImportRefused(Exception):
    """A file cannot be taken as measurements; nothing of it was loaded. `problems` has one sentence a bad row."""

    def __init__(self, path: Path, problems: list[str], *, hint: str = "") -> None:
        self.problems = problems
        shown = "\n".join(f"  {problem}" for problem in problems[:_SHOWN])
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        super().__init__(
            f"{path} was refused and nothing of it loaded:\n{shown}{more}"
            + (f"\n{hint}" if hint else "")
        )


def one_edit_apart(one: str, other: str) -> bool:
    """Is `other` what `one` becomes by adding, dropping or changing one character, or swapping two neighbours?"""
    short, long = sorted((one, other), key=len)
    if one == other or len(long) - len(short) > 1:
        return False
    start = next(
        (at for at, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short)
    )
    if len(short) < len(long):
        return short[start:] == long[start + 1 :]
    swapped = (
        long[start : start + 2][::-1] == short[start : start + 2]
        and short[start + 2 :] == long[start + 2 :]
    )
    return swapped or short[start + 1 :] == long[start + 1 :]


def _not_predicted(column: str, name: str, known: Iterable[str]) -> str:
    return f"unknown {column} {name!r}, which no model predicts; known: {', '.join(known)}"


def _text(value: Any) -> Any:
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    hidden = None
    if not text.isprintable():  # which a blank of another width is not, either
        hidden = next((one for one in text if unicodedata.category(one) in _INVISIBLE), None)
    if hidden is not None:
        raise ValueError(f"it holds the invisible character U+{ord(hidden):04X}: take it out")
    return text


def _whole(value: Any) -> Any:
    """Whole numbers may be written 1.09e8."""
    return int(float(value)) if isinstance(value, str) and float(value).is_integer() else value


def _in_utc(moment: datetime) -> datetime:
    if isinstance(moment, pd.Timestamp):  # of Parquet's nanoseconds, which are not kept
        moment = moment.to_pydatetime(warn=False)
    return in_utc(moment)


Text = Annotated[str, BeforeValidator(_text), Field(min_length=1)]
Whole = Annotated[int, BeforeValidator(_whole), Field(ge=1, lt=2**63)]
Seconds = Annotated[float, Field(gt=0)]
Waited = Annotated[float, Field(ge=0)]
Moment = Annotated[datetime, AfterValidator(_in_utc)]


class Measurement(BaseModel):
    """One measured step time, in the columns of the design's measurement rows. None is unknown."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="forbid")

    workload: Text
    cluster: Text
    batch_per_device: Text
    step_s: Seconds
    layout: Text | None = None
    accumulation_steps: Annotated[Whole, Field(lt=2**31)] = 1
    strategy: Text = "ddp"
    precision: Text = "fp32"
    switches: Text = "none"
    sync_s: Waited | None = None
    provider: Text = "ec2"
    gradient_bytes: Whole | None = None
    parameters: Whole | None = None
    flops_per_sample: float | None = Field(default=None, gt=0)
    market: Text | None = None
    zone: Text | None = None
    run_id: Text | None = None
    source: Text | None = None
    measured_at: Moment | None = None

    @field_validator("cluster")
    @classmethod
    def _a_cluster(cls, text: str) -> str:
        parse_cluster(text)
        return text

    @field_validator("provider")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in PROVIDERS:
            raise ValueError(f"unknown provider {name!r}; {nearest_names(name, PROVIDERS)}")
        return name

    @field_validator("precision")
    @classmethod
    def _a_precision(cls, name: str) -> str:
        plain = _SAME_PRECISION.get(name.lower(), name.lower())
        if plain not in PRECISIONS:
            raise ValueError(_not_predicted("precision", name, PRECISIONS))
        return plain

    @field_validator("strategy")
    @classmethod
    def _a_strategy(cls, name: str, info: ValidationInfo) -> str:
        plain = name.lower()
        if plain not in STRATEGIES:
            raise ValueError(_not_predicted("strategy", name, STRATEGIES))
        layout = info.data.get("layout")
        if layout and "cluster" in info.data and Mode(strategy=plain).of_several:
            devices = parse_numbers(layout, len(parse_cluster(info.data["cluster"])), "layout")
            sizes = [
                np.array([one]) for one in (len(devices), min(devices), max(devices), sum(devices))
            ]
            if not Mode(strategy=plain).runs_on(*sizes)[0]:
                raise ValueError(
                    f"{plain} cannot train on {'+'.join(map(str, devices))} devices: gradients are sent between"
                    " several, by ddp-mstopk between machines with equally many each, by adasum between 2, 4, 8 ...,"
                    " by ps-S between S machines at least; tensor-2d divides layers among q x q, tensor-2.5d among"
                    " q x q x d"
                )
        return plain

    @field_validator("switches")
    @classmethod
    def _switches(cls, joined: str, info: ValidationInfo) -> str:
        named = set(joined.lower().split("+"))
        plain = next(
            (one for one in SWITCHES if set(one.split("+")) == named), joined
        )  # in any order
        if plain not in SWITCHES:
            raise ValueError(_not_predicted("switches", joined, SWITCHES))
        strategy = info.data.get("strategy") or STRATEGIES[0]
        if Mode(strategy=strategy, switches=plain) not in MODES:
            alone = strategy == TABLES or Mode(strategy=strategy).divided
            why = "it goes with no switch" if alone else "no states are shared out"
            raise ValueError(f"{plain} with {strategy}: {why}; offload goes with fsdp and zero2")
        return plain

    @field_validator("batch_per_device", "layout")
    @classmethod
    def _one_an_instance(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is None or "cluster" not in info.data:
            return text
        numbers = parse_numbers(
            text, len(parse_cluster(info.data["cluster"])), str(info.field_name)
        )
        return str(numbers[0]) if "+" not in text else "+".join(str(number) for number in numbers)


class _Timing(BaseModel):
    """The columns of a measurement in which the runs of one setup differ: the others are validated once."""

    model_config = Measurement.model_config

    step_s: Seconds
    sync_s: Waited | None = None
    run_id: Text | None = None
    measured_at: Moment | None = None


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
    """A sound file: its digest and its rows.

    `ignored` are columns that were not read, `stripped` how many values of a column had blanks around them. A place in
    `rows` counts lines of a CSV (its header is line 1), or Parquet's rows.
    """

    file_digest: str
    rows: StagedRows
    ignored: tuple[str, ...]
    stripped: dict[str, int]

    def frame(self) -> pd.DataFrame:
        """The rows as the mart `runs` has them, in file order: for a backtest without a warehouse."""
        return self.rows.frame().assign(step_spread=float("nan"))


@contextmanager
def read_measurements(path: Path) -> Iterator[Measurements]:
    """The rows of a CSV or Parquet file of measurements, until the block ends.

    Raises ImportRefused naming every bad row, and DiskFull where the rows do not fit into the folder for temporaries.
    """
    stripped: Counter[str] = Counter()
    ignored = _check_columns(path, Measurement)
    with staged(_chunks(path, ignored, stripped)) as rows:
        word = row_word(path)
        problems = [
            f"{word} {one.place}, column run_id: {one.run_id!r} stands on {word} {one.first_place} with other values"
            for one in rows.contradictions()
        ]
        if problems:
            raise ImportRefused(path, problems)
        yield Measurements(
            file_digest=digest_of_file(path),
            rows=rows,
            ignored=tuple(sorted(ignored)),
            stripped=dict(stripped),
        )


def digest_of_file(path: Path) -> str:
    """Sixteen hex digits of the file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def read_facts(path: Path) -> list[dict[str, Any]]:
    """The rows of a `--workloads` file, unknown facts left out. Raises ImportRefused."""
    return [
        row.model_dump(exclude_none=True) for row in read_descriptions(path, Facts, key="workload")
    ]


def ignored_fact_columns(path: Path) -> list[str]:
    """A sentence for each column of a `--workloads` file that is no fact. Raises ImportRefused."""
    return ignored_columns(sorted(_check_columns(path, Facts)))


def read_descriptions(path: Path, kind: type[_Row], *, key: str) -> list[_Row]:
    """The rows of a file that describes each `key` once. Raises ImportRefused."""
    rows = [row for _, row in _validated(path, kind, _check_columns(path, kind), Counter())]
    twice = [
        name for name, count in Counter(getattr(row, key) for row in rows).items() if count > 1
    ]
    if twice:
        raise ImportRefused(
            path, [f"column {key}: {name!r} stands more than once" for name in twice]
        )
    return rows


def _check_columns(path: Path, kind: type[BaseModel]) -> set[str]:
    """Columns to ignore. Raises ImportRefused where a required one is missing, one stands twice or looks misspelt."""
    columns = _columns(path)
    known = list(kind.model_fields)
    missing = [
        name
        for name, field in kind.model_fields.items()
        if field.is_required() and name not in columns
    ]
    if missing:
        whole = next(
            (
                problem
                for problem in (_other_separator(columns), _other_file(columns, kind))
                if problem
            ),
            "",
        )
        if whole:
            raise ImportRefused(path, [whole])
    problems = [f"there is no column {name!r}" for name in missing]
    problems += [
        f"column {name!r} stands more than once" for name in known if columns.count(name) > 1
    ]
    ignored = set(columns) - set(known)
    for name in sorted(ignored):
        near = _near_column(name, known)
        if near:
            problems.append(f"column {name!r} is not known: did you mean {near!r}?")
    if problems:
        raise ImportRefused(path, problems)
    return ignored


_LEAST_SHORT = 5  # letters by which the beginning of a column's name is known


def _near_column(name: str, known: list[str]) -> str | None:
    plain = name.lower().replace(" ", "_").replace("-", "_")
    near = difflib.get_close_matches(plain, known, n=1, cutoff=0.85)
    near += [one for one in known if one_edit_apart(plain, one)]
    near += [
        one for one in known if len(plain) >= _LEAST_SHORT and one.startswith(f"{plain}_")
    ]  # `flops`
    return near[0] if near else None


def _other_separator(columns: list[str]) -> str:
    """That the columns of a CSV are not separated by commas; empty where they are."""
    found = next((mark for mark in _SEPARATORS if len(columns) == 1 and mark in columns[0]), None)
    return (
        f"its columns are separated by {_SEPARATORS[found]}; separate them by ','" if found else ""
    )


def _other_file(columns: list[str], kind: type[BaseModel]) -> str:
    """That measurements stand where facts are wanted, or the other way round; empty where they do not."""
    measurements = {"cluster", "step_s"} <= set(columns)
    facts = {"workload"} <= set(columns) and not {"cluster", "step_s"} & set(columns) and bool(
        {"parameters", "gradient_bytes", "flops_per_sample"} & set(columns)
    )  # fmt: skip
    if kind is Measurement and facts:
        return "it looks like facts of workloads, not measurements: give it with --workloads"
    if kind is Facts and measurements:
        return "it looks like measurements, not facts of workloads: give it without --workloads"
    return ""


def ignored_columns(names: Iterable[str]) -> list[str]:
    """A sentence for each column that was not read."""
    return [
        f"column {name} is not one of the contract's and was ignored"
        if name
        else "a column without a name was ignored"
        for name in names
    ]


def _validated(
    path: Path, kind: type[_Row], ignored: set[str], stripped: Counter[str]
) -> Iterator[tuple[int, _Row]]:
    problems: list[str] = []
    columns = _columns(path)
    for place, values in _raw_rows(path):
        given = _given(columns, values, ignored, stripped)
        row, wrong = (None, _LONG) if len(values) > len(columns) else _row_of(kind, given)
        problems += (f"{row_word(path)} {place}{one}" for one in wrong)
        if row is not None and not problems:
            yield place, row
    if problems:
        raise ImportRefused(path, problems)


_LONG = [": more values than the header has columns"]


def _given(
    columns: Sequence[str], values: Sequence[Any], ignored: Collection[str], stripped: Counter[str]
) -> dict[str, Any]:
    """What a row says, by column: neither blank nor NaN; counts in `stripped` where blanks were dropped."""
    given = {}
    for name, value in zip(columns, values, strict=False):
        if isinstance(value, str):
            text = value.strip()
            if text and name not in ignored:
                given[name] = text
                if len(text) < len(value):
                    stripped[name] += 1
        elif value is not None and value == value and name not in ignored:
            given[name] = value
    return given


def _row_of(kind: type[_Row], given: Mapping[str, Any]) -> tuple[_Row | None, list[str]]:
    """The row; None with what is wrong in it, each to be read behind its place."""
    try:
        return kind.model_validate(given), []
    except ValidationError as error:
        problems = []
        for one in error.errors(include_url=False):
            got = (
                ""
                if one["type"] == "missing"
                else f" (it says {str(given.get(str(one['loc'][0])))!r})"
            )
            reason = (
                "is empty" if one["type"] == "missing" else one["msg"].removeprefix("Value error, ")
            )
            problems.append(f", column {one['loc'][0]}: {reason}{got}")
        return None, problems


_SETUP_COLUMNS = [name for name in Measurement.model_fields if name not in _Timing.model_fields]
_CHUNK_ROWS = 50_000
_MOST_SETUPS = 50_000  # that are remembered: some 100 MB


class _Setup:
    """What rows have in common that differ in _Timing alone. Validated once, which makes millions of rows quick."""

    def __init__(self, row: Measurement, stripped: Counter[str]) -> None:
        self.values, self.stripped = tuple(getattr(row, name) for name in _SETUP_COLUMNS), stripped
        usual = {
            name for name in _SINCE if getattr(row, name) == Measurement.model_fields[name].default
        }
        said = {
            name: f"%({name})s"
            if name in _Timing.model_fields
            else json.dumps(value).replace("%", "%%")
            for name, value in row.model_dump(mode="json", exclude=usual).items()
        }
        self._content = "{" + ", ".join(f'"{name}": {said[name]}' for name in sorted(said)) + "}"

    def content(self, times: _Timing | Measurement) -> str:
        """All that a row of these `times` says, as JSON with sorted keys: what a row is known by."""
        return self._content % {
            "step_s": repr(times.step_s),
            "sync_s": "null" if times.sync_s is None else repr(times.sync_s),
            "run_id": "null" if times.run_id is None else json.dumps(times.run_id),
            "measured_at": "null"
            if times.measured_at is None
            else f'"{times.measured_at.isoformat()}"',
        }


class _Chunk:
    """Rows that were read, by column."""

    def __init__(self) -> None:
        self._setups: dict[_Setup, int] = {}
        self._rows: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, place: int, setup: _Setup, times: _Timing | Measurement) -> None:
        which = self._setups.setdefault(setup, len(self._setups))
        content = setup.content(times)
        digest = _digest(content if times.run_id is not None else f"{content}#1")
        self._rows.append(
            (
                which,
                place,
                content,
                digest,
                times.step_s,
                times.sync_s,
                times.run_id,
                times.measured_at,
            )
        )

    def table(self) -> pa.Table:
        """In the warehouse's columns."""
        names = ("which", "place", "content", "digest", *_Timing.model_fields)
        columns = dict(
            zip(
                names,
                zip(*self._rows, strict=True) if self._rows else [()] * len(names),
                strict=True,
            )
        )
        which = pa.array(columns.pop("which"), pa.int32())
        of_setups = (
            zip(*(setup.values for setup in self._setups), strict=True)
            if self._setups
            else repeat(())
        )
        setups = dict(zip(_SETUP_COLUMNS, of_setups, strict=False))
        arrays = [
            pa.array(columns[field.name], field.type)
            if field.name in columns
            else pa.array(setups[field.name], field.type).take(which)
            for field in CHUNK
        ]
        return pa.Table.from_arrays(arrays, schema=CHUNK)


def _chunks(path: Path, ignored: set[str], stripped: Counter[str]) -> Iterator[pa.Table]:
    """The rows of a file of measurements. Raises ImportRefused once all were looked at."""
    columns, word = _columns(path), row_word(path)
    of_timing = [name in _Timing.model_fields for name in columns]
    of_setup = [
        name in Measurement.model_fields and name not in _Timing.model_fields for name in columns
    ]
    timing, setup_columns = list(compress(columns, of_timing)), list(compress(columns, of_setup))
    known: dict[tuple[Any, ...], _Setup] = {}
    problems: list[str] = []
    chunk = _Chunk()
    for place, values in _raw_rows(path):
        key = tuple(compress(values, of_setup))
        setup = known.get(key)
        timed = _given(timing, list(compress(values, of_timing)), ignored, stripped)
        times: _Timing | Measurement | None = None
        if setup is not None and len(values) <= len(columns):
            times, _ = _row_of(_Timing, timed)
        if times is None or setup is None:
            in_setup: Counter[str] = Counter()
            given = _given(setup_columns, key, ignored, in_setup)
            row, wrong = (
                (None, _LONG) if len(values) > len(columns) else _row_of(Measurement, given | timed)
            )
            problems += (f"{word} {place}{one}" for one in wrong)
            if row is None:
                continue
            if len(known) >= _MOST_SETUPS:
                known.clear()
            times = row
            setup = known[key] = _Setup(row, in_setup)
        if setup.stripped:
            stripped.update(setup.stripped)
        if not problems:
            chunk.add(place, setup, times)
        if len(chunk) == _CHUNK_ROWS:
            yield chunk.table()
            chunk = _Chunk()
    if problems:
        raise ImportRefused(path, problems)
    yield chunk.table()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def is_parquet(path: Path) -> bool:
    """Is the file taken for Parquet, by its name?"""
    return path.suffix.lower() in (".parquet", ".pq")


def row_word(path: Path) -> str:
    """What a place in the file counts: lines of a CSV, rows of a Parquet file."""
    return "row" if is_parquet(path) else "line"


def _columns(path: Path) -> list[str]:
    """Names of the columns, without blanks around them."""
    if (
        path.exists() and not path.is_file()
    ):  # a pipe is empty once it was read, and the file is read more than once
        raise ImportRefused(path, ["it is not a regular file"])
    try:
        if is_parquet(path):
            return [name.strip() for name in pq.read_schema(path).names]
        with path.open(newline="", encoding="utf-8-sig") as file:
            return [name.strip() for name in next(csv.reader(file), [])]
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


def _raw_rows(path: Path) -> Iterator[tuple[int, Sequence[Any]]]:
    """The values of each row in the columns' order, with its place. A CSV's rows may have fewer, or more."""
    try:
        if is_parquet(path):
            with pq.ParquetFile(path) as file:
                batches = file.iter_batches(_CHUNK_ROWS)
                rows = chain.from_iterable(
                    zip(*map(_values, batch.columns), strict=True) for batch in batches
                )
                yield from enumerate(rows, 1)
            return
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            next(reader, None)  # the header
            for row in reader:
                if row:
                    yield reader.line_num, row
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


def _values(column: pa.Array) -> list[Any]:
    """None where it is NaN, which is equal to no other; lists and structs, which are no values here, as text."""
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)
    values: list[Any] = column.to_pylist()
    if pa.types.is_nested(column.type):
        return [None if value is None else str(value) for value in values]
    return values


_UNREADABLE = (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException)


def _unreadable(path: Path, error: Exception) -> ImportRefused:
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return ImportRefused(path, [f"it cannot be read: {reason}"])
