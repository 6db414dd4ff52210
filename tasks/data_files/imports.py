"""`srift import` and `srift forget`: measurements made elsewhere and facts of workloads, loaded or refused whole.

An import that is forgotten stays in the warehouse and no longer counts; importing the same files again brings it back.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from models.domain.cluster import parse_cluster, parse_numbers
from models.domain.setup_table import rows_of
from models.domain.suggestions import NAME_RULE, nearest_names, plain_name
from warehouse.append import Connection, append_facts, note_import
from warehouse.database import Warehouse, select
from warehouse.imports import append_imports, counted_before, empty_warehouse, rows_to_judge
from warehouse.reads import (
    KnownToImport,
    known_to_import,
    knows_import,
    measured_workloads,
    seconds_by_setup,
)

from ..reporting.progress import reporter
from ..workspace.settings import SettingsError
from ..workspace.workspace import Workspace, known_devices, refresh_command
from .measurements import (
    ImportRefused,
    Measurement,
    Measurements,
    digest_of_file,
    ignored_columns,
    ignored_fact_columns,
    read_facts,
    read_measurements,
    row_word,
)
from .plausibility import Device, Known, implausible, impossible, setup_of
from .public import (
    FACTS,
    MEASUREMENTS,
    ORIGIN,
    PROVIDER,
    PUBLIC_IMPORT,
    public_workloads,
    with_public_workloads,
)

DEFAULT_PROVIDER = "ec2"  # of rows that name none, as the measurement columns have it
_FACTS = ("parameters", "gradient_bytes", "flops_per_sample", "samples")
_LISTED = 12  # instance types in a summary
_LEAST_DIGITS = 4  # of an import's id that is cut short


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRead:
    """An instance type in a file: its rows, what a device of it is ("" unknown), and how many were used at once."""

    provider: str
    name: str
    rows: int
    device: str
    least_devices: int
    most_devices: int

    def __str__(self) -> str:
        number = str(self.least_devices)
        if self.most_devices > self.least_devices:
            number += f" to {self.most_devices}"
        noun = "device" if self.most_devices == 1 else "devices"
        return f"{self.name} ({number} {noun}{' of ' + self.device if self.device else ''}, {_rows(self.rows)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What became of an import: rows and how many were new, how they were read, facts, and warnings."""

    import_id: str
    rows: int
    new: int
    dry_run: bool = False
    providers: tuple[str, ...] = ()
    workloads: dict[str, int] = field(default_factory=dict)
    types: tuple[TypeRead, ...] = ()
    without_layout: int = 0
    precisions: dict[str, int] = field(default_factory=dict)
    strategies: dict[str, int] = field(default_factory=dict)
    facts: dict[str, int] = field(
        default_factory=dict
    )  # of how many workloads they are new, changed, the same
    sentences: tuple[str, ...] = ()

    def as_text(self) -> str:
        """The summary, a line a subject."""

        def by_name(what: str, counted: Mapping[str, int]) -> list[str]:
            named = ", ".join(f"{name} ({_rows(rows)})" for name, rows in counted.items())
            return [f"{what}: {named}"] if named else []

        lines = (
            [f"{_rows(self.rows)}, {self.new} of them new"] if self.rows or not self.facts else []
        )
        lines += by_name("workloads", self.workloads)
        if self.types:
            more = f" and {len(self.types) - _LISTED} more" if len(self.types) > _LISTED else ""
            lines.append("instance types: " + ", ".join(map(str, self.types[:_LISTED])) + more)
        if self.without_layout:
            lines.append(
                f"layout: absent in {_rows(self.without_layout)}, taken as all devices of each instance"
            )
        lines += by_name("precision", self.precisions) + by_name("strategy", self.strategies)
        if self.facts:
            lines.append(
                "facts of workloads: "
                + ", ".join(f"{count} {what}" for what, count in self.facts.items())
            )
        lines += self.sentences
        if self.dry_run:
            lines.append("dry run: nothing was loaded")
        elif self.import_id:
            lines.append(f"import {self.import_id}; `srift forget {self.import_id}` undoes it")
        if not self.dry_run and (self.new or self.facts.get("new") or self.facts.get("changed")):
            lines.append(f"to learn from it: {_refreshes(self.providers)}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """What became of an import that was forgotten: rows and facts that no longer count, and a sentence."""

    import_id: str
    rows: int
    facts: int
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportFiles:
    """A file of measurements, one of facts of workloads, or both; the provider that facts are of, beside the rows'."""

    measurements: Path | None = None
    workloads: Path | None = None
    provider: str | None = None

    def import_id(self, providers: Iterable[str]) -> str:
        """The digest of the file of measurements, or of both files and the providers that the facts are for; the
        package's own file has a name."""
        if self.measurements is not None and digest_of_file(self.measurements) == digest_of_file(
            MEASUREMENTS
        ):
            return PUBLIC_IMPORT
        if self.workloads is None and self.measurements is not None:
            return digest_of_file(self.measurements)
        digests = (
            "" if one is None else digest_of_file(one)
            for one in (self.measurements, self.workloads)
        )
        return hashlib.sha256(json.dumps([*digests, *sorted(providers)]).encode()).hexdigest()[:16]


def import_measurements(
    warehouse: Warehouse,
    files: ImportFiles,
    now: datetime,
    *,
    local_types: Iterable[str] = (),
    force: bool = False,
    dry_run: bool = False,
) -> Imported:
    """`srift import`: load the rows of a file, facts of workloads, or both, in one transaction.

    Loading the same again changes nothing, and rows that were loaded before are not judged again. `force` loads what is
    implausible, `dry_run` nothing. Raises ImportRefused and WarehouseError; nothing was loaded then.
    """
    path, workloads = files.measurements, files.workloads
    with ExitStack() as opened:
        measured = None if path is None else opened.enter_context(read_measurements(path))
        facts = read_facts(workloads) if workloads else []
        rows = _Rows() if measured is None else _Rows.of(measured)
        providers = sorted({*rows.providers, *([files.provider] if files.provider else [])}) or [
            DEFAULT_PROVIDER
        ]
        connection = opened.enter_context(_opened(warehouse, writing=not dry_run))
        stored = known_to_import(connection)
        if workloads:
            _refuse_names(workloads, facts)
        counted = _count_facts(stored.facts, facts, providers)
        known = _known(stored, local_types, facts, providers)
        sentences: list[str] = []
        new = 0
        if path and measured:
            changed = {*counted["new"], *counted["changed"]}
            _judge(connection, path, measured, changed, known, now=now, force=force)
            new, other = counted_before(connection, measured.rows)
            sentences += _sentences(measured, rows, known, other)
        import_id = files.import_id(providers) if rows.number or facts else ""
        if import_id and not dry_run:
            names = [None if one is None else one.name for one in (path, workloads)]
            note_import(connection, import_id, event="imported", noted_at=now, files=names)
            if measured:
                append_imports(
                    connection,
                    measured.rows,
                    file_digest=measured.file_digest,
                    loaded_at=now,
                    import_id=import_id,
                )
            for one in providers:
                append_facts(connection, facts, provider=one, import_id=import_id, noted_at=now)
    return Imported(
        import_id=import_id,
        rows=rows.number,
        new=new,
        dry_run=dry_run,
        providers=tuple(providers) if rows.number or facts else (),
        workloads=rows.workloads,
        types=_types_read(rows, known),
        without_layout=sum(one.rows for one in rows.clusters if one.layout is None),
        precisions=rows.precisions,
        strategies=rows.strategies,
        facts={what: len(names) for what, names in counted.items()} if workloads else {},
        sentences=(
            *sentences,
            *(
                f"{workloads}: {one}"
                for one in (ignored_fact_columns(workloads) if workloads else ())
            ),
        ),
    )


def load_public(workspace: Workspace, now: datetime) -> int:
    """Import the public step times that came with the package where that was never done; how many rows, 0 if not.

    Emulated machines are others than the rows are of. Raises WarehouseError, of a home that cannot be written too.
    """
    warehouse = workspace.warehouse
    if workspace.settings.ec2.emulated or knows_import(warehouse, PUBLIC_IMPORT):
        return 0
    warehouse.migrate()
    files = ImportFiles(measurements=MEASUREMENTS, workloads=FACTS, provider=PROVIDER)
    loaded = import_measurements(warehouse, files, now, force=True)
    reporter().say(
        f"loaded {_rows(loaded.rows)} of {len(loaded.workloads)} workloads, {ORIGIN}; they count for {PROVIDER} until"
        f" there are rows of your own of a workload, or `srift forget {PUBLIC_IMPORT}`"
    )
    return loaded.rows


def asked_of_public(workspace: Workspace, workload: str, now: datetime) -> Workspace:
    """The workspace to ask about `workload`: of public step times, which are loaded where nothing else tells of it, it
    also names the workloads. Raises as `load_public`."""
    spec, warehouse = workspace.settings.workloads.get(workload), workspace.warehouse
    public = workload in public_workloads() and (spec is None or spec.entrypoint is None)
    loaded = public and knows_import(
        warehouse, PUBLIC_IMPORT
    )  # quicker to tell than what was measured
    if (
        public
        and not loaded
        and not (warehouse.exists() and workload in measured_workloads(warehouse, PROVIDER))
    ):
        load_public(workspace, now)
    return with_public_workloads(workspace)


def forget_import(warehouse: Warehouse, text: str, now: datetime) -> Forgotten:
    """`srift forget`: the import whose id begins with `text` no longer counts. Nothing is deleted.

    Raises SettingsError where no import, or more than one, is called so.
    """
    with warehouse.transact() as connection:
        known = {str(row["import_id"]): row for row in rows_of(select(connection, "imports"))}
        import_id = _chosen(text, list(known))
        held = known[import_id]
        if held["forgotten"]:
            return Forgotten(
                import_id=import_id,
                rows=0,
                facts=0,
                sentence=f"import {import_id} was forgotten before",
            )
        before = known_to_import(connection)
        note_import(connection, import_id, event="forgotten", noted_at=now)
        after = known_to_import(connection)
    rows = before.rows - after.rows
    facts = len(_facts_by_workload(before.facts).items() - _facts_by_workload(after.facts).items())
    return Forgotten(
        import_id=import_id, rows=rows, facts=facts, sentence=_forgotten_sentence(held, rows, facts)
    )


def list_imports(warehouse: Warehouse) -> list[dict[str, Any]]:
    """Every import, forgotten ones too, the oldest first: plain values."""
    with warehouse.read() as connection:
        rows = rows_of(select(connection, "imports"))
    return [
        {
            "import_id": row["import_id"],
            "file": row["file"] if isinstance(row["file"], str) else None,
            "facts_file": row["facts_file"] if isinstance(row["facts_file"], str) else None,
            "imported_at": row["imported_at"],
            "forgotten": bool(row["forgotten"]),
            "rows": int(row["measurements"]),
            "facts": int(row["facts"]),
            "providers": list(row["providers"]),
            "workloads": list(row["workloads"]),
        }
        for row in rows
    ]


@contextmanager
def _opened(warehouse: Warehouse, *, writing: bool) -> Iterator[Connection]:
    """A transaction, or a connection to read by; to an empty warehouse where there is none to read yet."""
    if writing:
        with warehouse.transact() as connection:
            yield connection
    else:
        with warehouse.read() if warehouse.exists() else empty_warehouse() as connection:
            yield connection


@dataclass(frozen=True, slots=True, kw_only=True)
class _Clusters:
    """Rows that were measured on the same instances in the same layout, and how many."""

    provider: str
    cluster: str
    layout: str | None
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """What a file's rows are of, with numbers of rows, the most frequent first."""

    number: int = 0
    workloads: dict[str, int] = field(default_factory=dict)
    precisions: dict[str, int] = field(default_factory=dict)
    strategies: dict[str, int] = field(default_factory=dict)
    clusters: tuple[_Clusters, ...] = ()

    @classmethod
    def of(cls, measured: Measurements) -> _Rows:
        rows = measured.rows
        clusters = rows.counted("provider", "cluster", "layout")
        return cls(
            number=len(rows),
            workloads=dict(rows.counted("workload")),
            precisions=dict(rows.counted("precision")),
            strategies=dict(rows.counted("strategy")),
            clusters=tuple(
                _Clusters(provider=provider, cluster=cluster, layout=layout, rows=many)
                for provider, cluster, layout, many in clusters
            ),
        )

    @property
    def providers(self) -> set[str]:
        return {one.provider for one in self.clusters}


def _known(
    stored: KnownToImport,
    local_types: Iterable[str],
    facts: Sequence[Mapping[str, Any]],
    providers: Iterable[str],
) -> Known:
    """What rows are judged by: what is stored, the package's and srift.toml's instance types, and the new facts."""
    types = {
        provider: {name: Device(count=count, kind=kind) for name, (count, kind) in found.items()}
        for provider, found in known_devices(local_types).items()
    }
    for row in rows_of(stored.instance_types):
        device = Device(count=int(row["devices"] or 1), kind=str(row["device"]))
        types.setdefault(str(row["provider"]), {})[str(row["name"])] = device
    flops = {
        (str(row["provider"]), str(row["workload"])): float(row["flops_per_sample"])
        for row in rows_of(stored.workloads)
        if pd.notna(row["flops_per_sample"])
    }
    for fact in facts:
        if "flops_per_sample" in fact:
            flops |= {
                (provider, fact["workload"]): fact["flops_per_sample"] for provider in providers
            }
    return Known(types=types, flops=flops)


def _with_seconds(known: Known, connection: Connection, workloads: set[str]) -> Known:
    """With the least and most seconds of each setup of the workloads."""
    counts = known.counts()
    setups = {
        setup_of(row, counts.get(str(row["provider"]), {})): (
            float(row["least_s"]),
            float(row["most_s"]),
        )
        for row in rows_of(seconds_by_setup(connection, workloads))
    }
    return replace(known, setups=setups)


def _refuse_names(path: Path, facts: Sequence[Mapping[str, Any]]) -> None:
    names = [fact["workload"] for fact in facts if not plain_name(fact["workload"])]
    if names:
        raise ImportRefused(
            path, [f"column workload: {NAME_RULE.format(name=name)}" for name in names]
        )


_MOST_JUDGED = 100_000  # rows that are judged one by one; of more, those of each setup that took least and longest


def _judge(
    connection: Connection,
    path: Path,
    measured: Measurements,
    changed: set[str],
    known: Known,
    *,
    now: datetime,
    force: bool,
) -> None:
    """Refuse rows that cannot be true, of those that do not count yet or whose workload's facts `changed`.

    Raises ImportRefused.
    """
    word = row_word(path)
    judged = [
        (f"{word} {row.pop('place')}", Measurement.model_construct(**row))
        for row in rows_to_judge(connection, measured.rows, changed, _MOST_JUDGED)
    ]
    problems = impossible(judged, now)
    doubtful = []
    if not force:
        doubtful = implausible(
            judged, _with_seconds(known, connection, {row.workload for _, row in judged})
        )
    if problems or doubtful:
        hint = "" if problems else "if they are right all the same, --force loads them"
        raise ImportRefused(path, problems + doubtful, hint=hint)


def _count_facts(
    current: pd.DataFrame, facts: Sequence[Mapping[str, Any]], providers: Iterable[str]
) -> dict[str, list[str]]:
    """Workloads by what their facts are to some provider: new, changed, or the same as the current ones."""
    stored = _facts_by_workload(current)
    counted: dict[str, list[str]] = {"new": [], "changed": [], "the same": []}
    for fact in facts:
        known = [stored.get((provider, fact["workload"])) for provider in providers]
        given = {place: float(fact[name]) for place, name in enumerate(_FACTS) if name in fact}
        agrees = all(
            one is not None and one[place] == value
            for one in known
            for place, value in given.items()
        )
        what = "new" if None in known else "the same" if agrees else "changed"
        counted[what].append(fact["workload"])
    return counted


def _facts_by_workload(current: pd.DataFrame) -> dict[tuple[str, str], tuple[float | None, ...]]:
    return {
        (str(row["provider"]), str(row["workload"])): tuple(
            float(row[name]) if pd.notna(row[name]) else None for name in _FACTS
        )
        for row in rows_of(current)
    }


def _types_read(rows: _Rows, known: Known) -> tuple[TypeRead, ...]:
    counted: Counter[tuple[str, str]] = Counter()
    used: dict[tuple[str, str], set[int]] = {}
    for one in rows.clusters:
        cluster, types = parse_cluster(one.cluster), known.devices(one.provider)
        layout = parse_numbers(one.layout, len(cluster), "layout") if one.layout else None
        for name in set(cluster):
            counted[one.provider, name] += one.rows
        whole = [types[name].count if name in types else 1 for name in cluster]
        for name, devices in zip(cluster, layout or whole, strict=True):
            used.setdefault((one.provider, name), set()).add(devices)
    return tuple(
        TypeRead(
            provider=provider,
            name=name,
            rows=many,
            device=known.devices(provider)[name].kind if name in known.devices(provider) else "",
            least_devices=min(used[provider, name]),
            most_devices=max(used[provider, name]),
        )
        for (provider, name), many in counted.most_common()
    )


def _sentences(measured: Measurements, rows: _Rows, known: Known, other: int) -> Iterator[str]:
    """What a person should know of how the rows were read; `other` have a run_id that is known with another time."""
    yield from ignored_columns(measured.ignored)
    if measured.stripped:
        yield "blanks were dropped around " + ", ".join(
            f"{n} {'value' if n == 1 else 'values'} of {name}"
            for name, n in measured.stripped.items()
        )
    if not rows.number:
        yield "the file of measurements has no row"
    unknown = {
        name
        for one in rows.clusters
        for name in parse_cluster(one.cluster)
        if name not in known.devices(one.provider)
    }
    if unknown:
        alone = any(
            one.layout is None and unknown & set(parse_cluster(one.cluster))
            for one in rows.clusters
        )
        one_device = "; without a layout it is taken to have one device" if alone else ""
        yield f"nobody knows {', '.join(sorted(unknown))}: predicted from its own rows, and unpriced{one_device}"
    if other:
        yield (
            f"{_rows(other)} with a run_id that is known with another step_s: the first one counts until its import is "
            "forgotten (`srift forget --list`)"
        )


def _chosen(text: str, known: Sequence[str]) -> str:
    found = [
        one for one in known if one == text or (len(text) >= _LEAST_DIGITS and one.startswith(text))
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise SettingsError(f"more than one import is called {text}...: {', '.join(found)}")
    raise SettingsError(
        f"unknown import {text!r}; {nearest_names(text, known)} (`srift forget --list` has all of them)"
    )


def _forgotten_sentence(held: Mapping[str, Any], rows: int, facts: int) -> str:
    """`held` is the import as the mart `imports` has it."""
    files = " and ".join(
        str(held[name]) for name in ("file", "facts_file") if isinstance(held[name], str)
    )
    counted = [_rows(rows)] * (rows > 0 or not facts)
    counted += [f"facts of {facts} workload{'' if facts == 1 else 's'}"] * (facts > 0)
    others = int(held["measurements"]) - rows
    held_elsewhere = (
        f"; {_rows(others)} of it still count, since another import holds them" if others else ""
    )
    until = _refreshes(held["providers"])
    again = (
        f" (`srift import {MEASUREMENTS} --workloads {FACTS}`)"
        if held["import_id"] == PUBLIC_IMPORT
        else ""
    )
    return (
        f"import {held['import_id']}{f' of {files}' if files else ''} is forgotten: {' and '.join(counted)} no longer "
        f"count{held_elsewhere}. The model in force has learned from it until {until}. Importing it again{again} "
        "brings it back"
    )


def _refreshes(providers: Iterable[str]) -> str:
    """The commands that fit a model anew and buy nothing."""
    return " and ".join(f"`{refresh_command(one, '0')}`" for one in providers)


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"
