"""Load the files of an ended launch into the warehouse: results of runs, cost and machines.

A machine writes a record (a JSON file) for each run. If a record is invalid, its run counts as
failed, and the record is moved to SRIFT_HOME/rejected. If a launch is loaded twice, its rows are
stored once.
"""

import json
import shutil
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from warehouse.append import append, append_records

from ..node.device_check import wrong_device
from ..node.record import DATA, INSTALL
from ..providers.base import Lease, json_of_node, read_object
from ..workspace.workspace import Workspace
from .mailbox import machine_rows
from .outcomes import Row, RunSetups, launch_row, refresh_of, run_row

_LEASE_COLUMNS = ("lease_id", "cluster", "market", "started_at", "ended_at", "usd", "outcome")
_MAX_MESSAGE = 500  # maximum number of characters of a machine's message that are printed

Unix = Annotated[float, Field(gt=0, lt=4e9)]  # seconds in the range of a timestamp


class _Wire(BaseModel, strict=True, frozen=True, allow_inf_nan=False, extra="allow"):
    """A JSON object from a machine, validated because machines may send wrong data.

    Keys that are not fields of the class are kept, unless a subclass forbids them.
    """


class _Values(_Wire):
    taken_share: float | None = Field(default=None, ge=0, le=1)
    reference_s: list[PositiveFloat] | None = None
    reference_blocks: PositiveInt | None = None
    reference_spread: NonNegativeFloat | None = None
    parameters: PositiveInt | None = None
    gradient_bytes: PositiveInt | None = None
    loader_workers: NonNegativeInt | None = None


class _Train(_Values):
    step_s: PositiveFloat
    step_spread: NonNegativeFloat | None = None
    sync_s: NonNegativeFloat | None = None
    input_s: NonNegativeFloat | None = None
    checkpoint_s: PositiveFloat | None = None
    checkpoint_bytes: PositiveInt | None = None


class _Learn(_Values):
    losses: list[float]
    steps_a_window: PositiveInt
    diverged: bool


class _Start(_Wire):
    nodes: list[NonNegativeInt] = Field(min_length=1)
    step: NonNegativeInt
    lost_steps: NonNegativeInt
    last_unix: Unix | None
    began_unix: Unix
    restore_s: NonNegativeFloat | None
    restore_bytes: PositiveInt | None


class _Checkpoint(_Wire):
    step: NonNegativeInt
    bytes: PositiveInt
    seconds: PositiveFloat
    ended_unix: Unix


class _Elastic(_Values):
    steps: PositiveInt
    first_loss: float
    last_loss: float
    starts: list[_Start] = Field(min_length=1)
    checkpoints: list[_Checkpoint] = Field(min_length=1)


class _ProfiledBatch(_Wire):
    batch: PositiveInt
    forward_s: PositiveFloat
    backward_s: PositiveFloat
    optimizer_s: NonNegativeFloat
    input_s: NonNegativeFloat | None = None
    peak_bytes: PositiveFloat | None = None


class _Bucket(_Wire):
    bytes: PositiveInt
    ready_fraction: NonNegativeFloat


class _Profile(_Values):
    divided_weights: PositiveFloat | None = None
    divided_inputs: PositiveFloat | None = None
    divided_pairs: PositiveFloat | None = None
    rows: list[_ProfiledBatch] = Field(min_length=1)
    buckets: list[_Bucket]
    load_s: NonNegativeFloat | None = None
    load_wait_s: NonNegativeFloat | None = None


class _ProbedMessage(_Wire):
    bytes: PositiveInt
    seconds: PositiveFloat


class _Probe(_Values):
    rows: list[_ProbedMessage] = Field(min_length=1)


_KINDS: dict[str, type[_Values]] = {
    "train": _Train,
    "learn": _Learn,
    "elastic": _Elastic,
    "profile": _Profile,
    "probe": _Probe,
}


class WireDevices(_Wire, extra="forbid"):
    """The JSON form of `node.record.Devices`: the devices that a machine used in a run."""

    name: str = Field(min_length=1, max_length=200)
    count: PositiveInt
    threads: PositiveInt


class WireRecord(_Wire, extra="forbid"):
    """A machine's record of the result of a run, as `node.record.record_of` creates it."""

    run_id: str = Field(min_length=1)
    lease_id: str
    attempt: PositiveInt
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
    def _values_of_its_kind(self) -> Self:
        if self.status == "measured":
            _KINDS[self.kind].model_validate(self.values)
        return self


@dataclass(kw_only=True)
class Collected:
    """The result of loading the files of launches.

    new: number of rows that the warehouse did not have.
    by_status: {status of a run or launch: number of rows}, including rows that were not new.
    usd: cost of the launches in dollars.
    notes: messages for the user.
    lacking: {workload: why machines could not download its data or install its requirements}.
    """

    new: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    usd: float = 0.0
    notes: list[str] = field(default_factory=list)
    lacking: dict[str, str] = field(default_factory=dict)

    def add(self, other: Self) -> None:
        self.new += other.new
        self.by_status.update(other.by_status)
        self.usd += other.usd
        self.notes += other.notes
        self.lacking |= other.lacking


def load_lease(workspace: Workspace, lease: Lease, now: datetime) -> Collected:
    """Load the files of one ended launch in one transaction.

    The result's `notes` are about rejected records, machines that did not upload all files, and
    strategies whose losses were not compared with ddp's.

    lease: the record of the launch.

    Raises:
        WarehouseBusy: if another process writes. Nothing is loaded or moved.
        OSError: if a rejected record cannot be moved. The next load tries again.
    """
    mailbox, provider = lease.mailbox, workspace.provider.name
    run_setups = read_object(mailbox / "controller" / "envelopes.json") or {}
    read = map(read_object, sorted(mailbox.glob("controller/rows/*.json")))
    rows = [row for row in read if row] + _rows_of_end(lease, run_setups, provider)
    records, problems = list[Row](), dict[Path, str]()
    for file in sorted(mailbox.glob("node-*/records/*.json")):
        try:
            records.append(_record(file, lease.lease_id, run_setups))
        except ValueError as error:
            problems[file] = str(error)
            if setup := run_setups.get(file.stem):
                reason = f"its record could not be read: {error}"
                rows.append(run_row(lease.lease_id, file.stem, setup, "failed", reason))
    records.sort(key=lambda body: body["status"] != "measured")
    rows_by_run: dict[str, Row] = {}  # by run id: a measurement wins over a failure of the same run
    for body in [*records, *rows]:
        rows_by_run.setdefault(body["run_id"], {"ended_unix": now.timestamp()} | body)
    # the refresh that loads a launch may differ from the refresh that made it
    refresh_id = refresh_of(lease.lease_id)
    columns = {name: getattr(lease, name) for name in _LEASE_COLUMNS} | {"provider": provider}
    with workspace.warehouse.transact() as connection:
        new = append_records(
            connection, list(rows_by_run.values()), refresh_id=refresh_id, loaded_at=now
        )
        if lease.outcome != "refused":
            append(connection, "raw_leases", [columns], refresh_id=refresh_id)
        append(connection, "raw_machines", machine_rows(lease, provider), refresh_id=refresh_id)
    folder = workspace.home / "rejected" / lease.lease_id
    notes = sorted(
        {
            f"{record['setup']['workload']}: {record['reason'][:_MAX_MESSAGE]}"
            for record in records
            if record["reason"] and record["status"] == "measured"
        }
    )
    for file, reason in problems.items():
        target = folder / f"{file.parents[1].name}-{file.name}"
        # An error is not caught, so that the caller does not delete the mailbox with the record.
        folder.mkdir(parents=True, exist_ok=True)
        shutil.move(file, target)
        notes.append(f"record {file.stem} was not loaded: {reason}. It was moved to {target}")
    for file in sorted(mailbox.glob("node-*/refused.json")):
        reason = str((read_object(file) or {}).get("reason", "no reason given"))[:_MAX_MESSAGE]
        notes.append(f"{file.parent.name} did not upload all files: {reason}")
    return Collected(
        new=new,
        by_status=Counter(body["status"] for body in rows_by_run.values()),
        usd=lease.usd or 0.0,
        notes=notes,
        lacking={
            record["setup"]["workload"]: record["reason"]
            for record in records
            if record["cause"] in (DATA, INSTALL)
        },
    )


def _rows_of_end(lease: Lease, run_setups: RunSetups, provider: str) -> list[Row]:
    """Return rows for refused requests, and for a run that `srift reap` interrupted.

    Each refused request gets a row. If `srift reap` ended the launch, the first planned run without
    a record also gets a row, with the status "interrupted".
    """
    recorded_ids = {file.stem for file in lease.mailbox.glob("node-*/records/*.json")}
    items = (read_object(lease.mailbox / "plan.json") or {}).get("items", ())
    left = [item["run_id"] for item in items if item["run_id"] in run_setups.keys() - recorded_ids]
    about = run_setups or {"": {"provider": provider, "market": lease.market}}
    rows = [
        launch_row(lease.lease_id, lease.cluster, about, "refused", reason, number)
        for number, reason in enumerate(lease.refusals, 1)
    ]
    if lease.outcome == "reaped" and left:
        reason = "the launching process died or the deadline passed, and the machines were reaped"
        setup = run_setups[left[0]]
        rows.append(run_row(lease.lease_id, left[0], setup, "interrupted", reason))
    return rows


def _record(file: Path, lease_id: str, run_setups: RunSetups) -> Row:
    """Return the record in `file` together with the planned setup of its run.

    Raises ValueError if the record is invalid.
    """
    try:
        # NaN and infinity become None. The validation below rejects None in a required field.
        body = json_of_node(file.read_text(), parse_constant=lambda _: None)
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()  # raises for lone surrogates
        record = WireRecord.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if record.run_id != file.stem or record.run_id not in run_setups:
        raise ValueError(
            f"the record's run id {record.run_id} differs from the file name, or no run with this"
            " id was planned"
        )
    setup = dict(run_setups[record.run_id])
    wrong = wrong_device(
        [device["name"] for device in setup.get("expected_devices", ())],
        [device.name for device in record.devices],
    )
    # the lease id comes from the mailbox, because a machine may write a wrong lease id
    columns = {"setup": setup, "lease_id": lease_id, "wrong_device": wrong or None}
    return record.model_dump() | columns
