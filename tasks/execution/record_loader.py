"""Loads what came back from a launch: every sound record and the controller's rows, in one
transaction.

A record that is truncated or not of the wire's form is moved to `rejected/` in the mailbox and
counts as a failed run with that reason: it never stops the others, and nothing that was reported is
lost. Loading twice changes nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from warehouse.append import append, append_records
from warehouse.database import Warehouse

from ..node.device_check import wrong_device
from ..node.record import Devices
from ..providers.base import json_of_node
from .mailbox import read_object

_MOST_SAID = 500  # characters of a node's sentence

Unix = Annotated[float, Field(gt=0, lt=4e9)]  # seconds that a timestamp can hold
Whole = Annotated[int, Field(gt=0, lt=2**63)]  # what a bigint can hold
Count = Annotated[int, Field(ge=0, lt=2**31)]
Seconds = Annotated[float, Field(gt=0)]
Spent = Annotated[float, Field(ge=0)]  # seconds, or a spread


class _Wire(BaseModel):
    """What a node wrote: checked as untrusted bytes must be; keys that are not named here
    are kept.
    """

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, extra="allow")


class _Values(_Wire):
    taken_share: float | None = Field(default=None, ge=0, le=1)
    reference_s: list[Seconds] | None = None
    reference_blocks: Whole | None = None
    reference_spread: Spent | None = None


class _Train(_Values):
    step_s: Seconds
    step_spread: Spent | None = None
    sync_s: Spent | None = None
    input_s: Spent | None = None
    loader_workers: Count | None = None
    parameters: Whole | None = None
    gradient_bytes: Whole | None = None
    checkpoint_s: Seconds | None = None
    checkpoint_bytes: Whole | None = None


class _Learn(_Values):
    losses: list[float]
    steps_a_window: Whole
    diverged: bool


class _Start(_Wire):
    nodes: list[Count] = Field(min_length=1)
    step: Count
    lost_steps: Count
    last_unix: Unix | None
    began_unix: Unix
    restore_s: Spent | None
    restore_bytes: Whole | None


class _Checkpoint(_Wire):
    step: Count
    bytes: Whole
    seconds: Seconds
    ended_unix: Unix
    steps: Annotated[Count, Field(gt=0)]
    steps_s: Seconds


class _Elastic(_Values):
    steps: Annotated[Count, Field(gt=0)]
    first_loss: float
    last_loss: float
    parameters: Whole
    gradient_bytes: Whole
    starts: list[_Start] = Field(min_length=1)
    checkpoints: list[_Checkpoint] = Field(min_length=1)


class _ProfiledBatch(_Wire):
    batch: Annotated[Count, Field(gt=0)]
    forward_s: Seconds
    backward_s: Seconds
    optimizer_s: Spent
    input_s: Spent | None = None
    peak_bytes: Seconds | None = None


class _Bucket(_Wire):
    bytes: Whole
    ready_fraction: Spent


class _Profile(_Values):
    parameters: Whole
    gradient_bytes: Whole
    divided_weights: Seconds | None = None
    divided_inputs: Seconds | None = None
    divided_pairs: Seconds | None = None
    rows: list[_ProfiledBatch] = Field(min_length=1)
    buckets: list[_Bucket]
    loader_workers: Count | None = None
    load_s: Spent | None = None
    load_wait_s: Spent | None = None
    sample_bytes: Spent | None = None


class _ProbedMessage(_Wire):
    bytes: Whole
    seconds: Seconds


class _Probe(_Values):
    rows: list[_ProbedMessage] = Field(min_length=1)


_KINDS: dict[str, type[_Values]] = {
    "train": _Train,
    "learn": _Learn,
    "elastic": _Elastic,
    "profile": _Profile,
    "probe": _Probe,
}


class WireDevices(_Wire):
    """`node.record.Devices`."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=200)
    count: Whole
    threads: Whole


class WireRecord(_Wire):
    """`node.record.Record`, as untrusted bytes must be."""

    model_config = ConfigDict(extra="forbid")

    run_id: str = Field(min_length=1)
    lease_id: str
    attempt: Whole
    kind: Literal["train", "learn", "elastic", "profile", "probe"]
    status: Literal["measured", "failed"]
    reason: str
    item: dict[str, Any]
    workload_digest: str
    started_unix: Unix
    ended_unix: Unix
    fingerprint: str
    torch_version: str
    values: dict[str, Any]
    devices: list[WireDevices]
    cause: Literal["", "machine", "data", "install"]

    @model_validator(mode="after")
    def _values_of_its_kind(self) -> WireRecord:
        if self.status == "measured":
            _KINDS[self.kind].model_validate(self.values)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedLaunch:
    """A launch that is over: the mailbox with its nodes' records, and what the controller knows of
    it.

    `run_setups`: setups by run_id. `rows`: of runs without a record. `lease` and `machines`:
    columns of their tables, refresh_id still open.
    """

    mailbox: Path
    run_setups: Mapping[str, Mapping[str, Any]]
    rows: Sequence[Mapping[str, Any]] = ()
    lease: Mapping[str, Any] | None = None
    machines: Sequence[Mapping[str, Any]] = ()


@dataclass(slots=True, kw_only=True)
class Collected:
    """What was loaded: new rows, all rows by status, dollars, and sentences for the reader."""

    new: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    usd: float = 0.0
    notes: list[str] = field(default_factory=list)

    def add(self, other: Collected) -> None:
        """Count another launch too."""
        self.new += other.new
        self.by_status.update(other.by_status)
        self.usd += other.usd
        self.notes += other.notes


def load_mailbox(
    warehouse: Warehouse, launch: EndedLaunch, *, refresh_id: str, now: datetime
) -> Collected:
    """Load the records in the mailbox of `launch` and what its controller knows; dollars are left
    to the caller.

    `notes` has a sentence for each rejected record and each machine that left files behind. Raises
    WarehouseBusy; then nothing was loaded and the records lie where they were.
    """
    sound: list[dict[str, Any]] = []
    refused: dict[Path, str] = {}
    for file in sorted(launch.mailbox.glob("node-*/records/*.json")):
        try:
            sound.append(_record(file, launch))
        except ValueError as error:
            refused[file] = str(error)
    rows = [dict(row) for row in launch.rows]
    rows += [
        _unsound(file, why, launch) for file, why in refused.items() if _is_planned(file, launch)
    ]
    rows = [{"ended_unix": now.timestamp()} | row for row in rows]
    found: dict[str, dict[str, Any]] = {}  # of a run_id with several, a measurement counts first
    for body in [*sorted(sound, key=lambda one: one["status"] != "measured"), *rows]:
        found.setdefault(body["run_id"], body)
    with warehouse.transact() as connection:
        new = append_records(connection, list(found.values()), refresh_id=refresh_id, loaded_at=now)
        if launch.lease is not None:
            append(connection, "raw_leases", [launch.lease], refresh_id=refresh_id)
        append(connection, "raw_machines", launch.machines, refresh_id=refresh_id)
    notes = [_quarantine(file, reason) for file, reason in refused.items()]
    notes += map(_not_carried, sorted(launch.mailbox.glob("node-*/refused.json")))
    by_status = Counter(str(body["status"]) for body in found.values())
    return Collected(new=new, by_status=by_status, notes=notes)


def _is_planned(file: Path, launch: EndedLaunch) -> bool:
    return file.stem in launch.run_setups


def _record(file: Path, launch: EndedLaunch) -> dict[str, Any]:
    """The sound record in `file` with its setup. Raises ValueError saying what is wrong."""
    try:
        # a loss may be NaN, which JSON lacks: unknown; a NaN time is then missing and refused below
        body = json_of_node(file.read_text(), parse_constant=lambda _: None)
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()  # raises for lone surrogates
        record = WireRecord.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ValueError(f"{where}: {first['msg']}") from None
    except (ValueError, IsADirectoryError) as error:
        raise ValueError(f"it is truncated or not JSON ({error})") from None
    if record.run_id != file.stem or not _is_planned(file, launch):
        raise ValueError(f"no run {record.run_id} was planned for this launch")
    setup = dict(launch.run_setups[record.run_id])
    wrong = wrong_device(
        [Devices(**one) for one in setup.get("expected_devices", ())],
        [Devices(**one.model_dump()) for one in record.devices],
    )
    found = record.model_dump() | {"setup": setup}
    if launch.lease:  # of its machine, whatever the record says
        found["lease_id"] = launch.lease["lease_id"]
    return found | ({"wrong_device": wrong} if wrong else {})


def _unsound(file: Path, reason: str, launch: EndedLaunch) -> dict[str, Any]:
    """The row of a run whose record cannot be read."""
    setup = dict(launch.run_setups[file.stem])
    return {
        "run_id": file.stem,
        "lease_id": str(launch.lease["lease_id"]) if launch.lease else file.parents[2].name,
        "kind": setup["kind"],
        "status": "failed",
        "reason": f"its record could not be read: {reason}",
        "setup": setup,
    }


def _quarantine(file: Path, reason: str) -> str:
    """Move `file` to rejected/ beside the nodes' folders, with a note; returns the sentence that
    says so.
    """
    node = file.parents[1].name
    target = file.parents[2] / "rejected" / f"{node}-{file.name}"
    sentence = f"record {file.stem} of {node} was not loaded: {reason}; it lies in {target}"
    with suppress(OSError):  # a full disk must not stop the load
        target.parent.mkdir(exist_ok=True)
        file.replace(target)
        target.with_suffix(".txt").write_text(sentence + "\n")
    return sentence


def _not_carried(file: Path) -> str:
    """What a machine says of files that it did not upload: untrusted words."""
    try:
        body = read_object(file) or {}
    except OSError:  # the rows are in the warehouse by now
        body = {}
    reason = str(body.get("reason", "it does not say which"))
    printable = "".join(one for one in reason[:_MOST_SAID] if one.isprintable())
    return f"{file.parent.name} left files behind: {printable}"
