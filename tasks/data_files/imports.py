"""`srift import` and `srift forget`: measurements made elsewhere and facts of workloads, loaded or refused whole.

An import that is forgotten stays in the warehouse and no longer counts; importing the same files again brings it back.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from models.domain.cluster import parse_cluster, parse_numbers
from models.domain.setup_table import rows_of
from models.domain.suggestions import NAME_RULE, nearest_names, plain_name
from warehouse.append import Connection, append_facts, append_imports, note_import
from warehouse.database import Warehouse, select
from warehouse.reads import KnownToImport, known_to_import, knows_import, measured_workloads

from ..reporting.progress import reporter
from ..workspace.settings import SettingsError
from ..workspace.workspace import Workspace, known_devices, refresh_command
from .measurements import (
    ImportRefused,
    Measurement,
    Measurements,
    ReadRow,
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
    facts: dict[str, int] = field(default_factory=dict)  # of how many workloads they are new, changed, the same
    sentences: tuple[str, ...] = ()

    def as_text(self) -> str:
        """The summary, a line a subject."""

        def by_name(what: str, counted: Mapping[str, int]) -> list[str]:
            named = ", ".join(f"{name} ({_rows(rows)})" for name, rows in counted.items())
            return [f"{what}: {named}"] if named else []

        lines = [f"{_rows(self.rows)}, {self.new} of them new"] if self.rows or not self.facts else []
        lines += by_name("workloads", self.workloads)
        if self.types:
            more = f" and {len(self.types) - _LISTED} more" if len(self.types) > _LISTED else ""
            lines.append("instance types: " + ", ".join(map(str, self.types[:_LISTED])) + more)
        if self.without_layout:
            lines.append(f"layout: absent in {_rows(self.without_layout)}, taken as all devices of each instance")
        lines += by_name("precision", self.precisions) + by_name("strategy", self.strategies)
        if self.facts:
            lines.append("facts of workloads: " + ", ".join(f"{count} {what}" for what, count in self.facts.items()))
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
        if self.measurements is not None and digest_of_file(self.measurements) == digest_of_file(MEASUREMENTS):
            return PUBLIC_IMPORT
        if self.workloads is None and self.measurements is not None:
            return digest_of_file(self.measurements)
        digests = ("" if one is None else digest_of_file(one) for one in (self.measurements, self.workloads))
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
    measured = None if path is None else read_measurements(path)
    facts = read_facts(workloads) if workloads else []
    rows = measured.rows if measured else ()
    providers = sorted({row.provider for row in rows} | ({files.provider} if files.provider else set()))
    providers = providers or [DEFAULT_PROVIDER]
    with _opened(warehouse, writing=not dry_run) as connection:
        stored = known_to_import(connection) if connection else KnownToImport()
        if workloads:
            _refuse_names(workloads, facts)
        counted = _count_facts(stored.facts, facts, providers)
        judged = _to_judge(path, measured, stored, {*counted["new"], *counted["changed"]}) if path and measured else []
        known = _known(stored, local_types, facts, providers, {row.workload for _, row in judged})
        if path:
            _judge(path, judged, known, now=now, force=force)
        import_id = files.import_id(providers) if rows or facts else ""
        if connection and import_id and not dry_run:
            names = [None if one is None else one.name for one in (path, workloads)]
            note_import(connection, import_id, event="imported", noted_at=now, files=names)
            if measured:
                body = [_stored_row(one) for one in measured.read]
                append_imports(connection, body, file_digest=measured.file_digest, loaded_at=now, import_id=import_id)
            for one in providers:
                append_facts(connection, facts, provider=one, import_id=import_id, noted_at=now)
    return Imported(
        import_id=import_id,
        rows=len(rows),
        new=sum(one.identity not in stored.step_s for one in measured.read) if measured else 0,
        dry_run=dry_run,
        providers=tuple(providers) if rows or facts else (),
        workloads=dict(Counter(row.workload for row in rows).most_common()),
        types=_types_read(rows, known),
        without_layout=sum(row.layout is None for row in rows),
        precisions=dict(Counter(row.precision for row in rows).most_common()),
        strategies=dict(Counter(row.strategy for row in rows).most_common()),
        facts={what: len(names) for what, names in counted.items()} if workloads else {},
        sentences=(
            *(_sentences(measured, stored, known) if measured else ()),
            *(f"{workloads}: {one}" for one in (ignored_fact_columns(workloads) if workloads else ())),
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
    loaded = public and knows_import(warehouse, PUBLIC_IMPORT)  # quicker to tell than what was measured
    if public and not loaded and not (warehouse.exists() and workload in measured_workloads(warehouse, PROVIDER)):
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
            return Forgotten(import_id=import_id, rows=0, facts=0, sentence=f"import {import_id} was forgotten before")
        before = known_to_import(connection)
        note_import(connection, import_id, event="forgotten", noted_at=now)
        after = known_to_import(connection)
    rows = len(before.step_s) - len(after.step_s)
    facts = len(_facts_by_workload(before.facts).items() - _facts_by_workload(after.facts).items())
    return Forgotten(import_id=import_id, rows=rows, facts=facts, sentence=_forgotten_sentence(held, rows, facts))


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
def _opened(warehouse: Warehouse, *, writing: bool) -> Iterator[Connection | None]:
    """A transaction, or a connection to read by; None to read a warehouse that is not there yet."""
    if writing:
        with warehouse.transact() as connection:
            yield connection
    elif warehouse.exists():
        with warehouse.read() as connection:
            yield connection
    else:
        yield None


def _known(
    stored: KnownToImport,
    local_types: Iterable[str],
    facts: Sequence[Mapping[str, Any]],
    providers: Iterable[str],
    judged: set[str],
) -> Known:
    """What rows are judged by: what is stored, the package's and srift.toml's instance types, and the new facts.

    Of setups those of the workloads `judged`.
    """
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
            flops |= {(provider, fact["workload"]): fact["flops_per_sample"] for provider in providers}
    known = Known(types=types, flops=flops)
    counts = known.counts()
    setups = {
        setup_of(row, counts.get(str(row["provider"]), {})): (float(row["least_s"]), float(row["most_s"]))
        for row in rows_of(stored.setups)
        if row["workload"] in judged
    }
    return replace(known, setups=setups)


def _refuse_names(path: Path, facts: Sequence[Mapping[str, Any]]) -> None:
    names = [fact["workload"] for fact in facts if not plain_name(fact["workload"])]
    if names:
        raise ImportRefused(path, [f"column workload: {NAME_RULE.format(name=name)}" for name in names])


_Placed = tuple[str, Measurement]


def _to_judge(path: Path, measured: Measurements, stored: KnownToImport, changed: set[str]) -> list[_Placed]:
    """Rows that do not count yet, and those of workloads whose facts `changed`, each with its place."""
    word = row_word(path)
    return [
        (f"{word} {one.place}", one.values)
        for one in measured.read
        if one.identity not in stored.step_s or one.values.workload in changed
    ]


def _judge(path: Path, judged: Sequence[_Placed], known: Known, *, now: datetime, force: bool) -> None:
    """Refuse rows that cannot be true. Raises ImportRefused."""
    problems = impossible(judged, now)
    doubtful = [] if force else implausible(judged, known)
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
        agrees = all(one is not None and one[place] == value for one in known for place, value in given.items())
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


def _stored_row(row: ReadRow) -> dict[str, Any]:
    stored = {"identity": row.identity, "row_digest": row.digest, "row_number": row.place}
    return stored | {"provider": row.values.provider, "body": row.values.model_dump(mode="json")}


def _types_read(rows: Sequence[Measurement], known: Known) -> tuple[TypeRead, ...]:
    counted: Counter[tuple[str, str]] = Counter()
    used: dict[tuple[str, str], set[int]] = {}
    for row in rows:
        cluster, types = parse_cluster(row.cluster), known.devices(row.provider)
        layout = parse_numbers(row.layout, len(cluster), "layout") if row.layout else None
        counted.update((row.provider, name) for name in set(cluster))
        whole = [types[name].count if name in types else 1 for name in cluster]
        for name, devices in zip(cluster, layout or whole, strict=True):
            used.setdefault((row.provider, name), set()).add(devices)
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


def _sentences(measured: Measurements, stored: KnownToImport, known: Known) -> Iterator[str]:
    """What a person should know of how the rows were read."""
    yield from ignored_columns(measured.ignored)
    if measured.stripped:
        yield "blanks were dropped around " + ", ".join(
            f"{n} {'value' if n == 1 else 'values'} of {name}" for name, n in measured.stripped.items()
        )
    if not measured.rows:
        yield "the file of measurements has no row"
    unknown = {
        name for row in measured.rows for name in parse_cluster(row.cluster) if name not in known.devices(row.provider)
    }
    if unknown:
        alone = any(row.layout is None and unknown & set(parse_cluster(row.cluster)) for row in measured.rows)
        one = "; without a layout it is taken to have one device" if alone else ""
        yield f"nobody knows {', '.join(sorted(unknown))}: predicted from its own rows, and unpriced{one}"
    other = sum(
        row.run_id is not None and stored.step_s.get(row.run_id, row.step_s) != row.step_s for row in measured.rows
    )
    if other:
        yield (
            f"{_rows(other)} with a run_id that is known with another step_s: the first one counts until its import is "
            "forgotten (`srift forget --list`)"
        )


def _chosen(text: str, known: Sequence[str]) -> str:
    found = [one for one in known if one == text or (len(text) >= _LEAST_DIGITS and one.startswith(text))]
    if len(found) == 1:
        return found[0]
    if found:
        raise SettingsError(f"more than one import is called {text}...: {', '.join(found)}")
    raise SettingsError(
        f"unknown import {text!r}; {nearest_names(text, known)} (`srift forget --list` has all of them)"
    )


def _forgotten_sentence(held: Mapping[str, Any], rows: int, facts: int) -> str:
    """`held` is the import as the mart `imports` has it."""
    files = " and ".join(str(held[name]) for name in ("file", "facts_file") if isinstance(held[name], str))
    counted = [_rows(rows)] * (rows > 0 or not facts)
    counted += [f"facts of {facts} workload{'' if facts == 1 else 's'}"] * (facts > 0)
    others = int(held["measurements"]) - rows
    held_elsewhere = f"; {_rows(others)} of it still count, since another import holds them" if others else ""
    until = _refreshes(held["providers"])
    again = f" (`srift import {MEASUREMENTS} --workloads {FACTS}`)" if held["import_id"] == PUBLIC_IMPORT else ""
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
