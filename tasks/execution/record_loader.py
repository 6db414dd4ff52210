"""Loads what came back from a launch: every sound record and the controller's own rows, in one transaction.

A record that is truncated or not of the wire's form is moved to `rejected/` in the mailbox and counts as a failed run
with that reason: it never stops the others, and nothing that was reported is lost. Loading twice changes nothing.
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

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from warehouse.append import append, append_records
from warehouse.database import Warehouse

from ..node.device_check import wrong_device
from ..node.record import Devices
from ..providers.base import json_of_node
from .mailbox import read_object

_MOST_SAID = 500  # characters of a node's sentence

Unix = Annotated[float, Field(gt=0, lt=4e9)]  # seconds that a timestamp can hold
Whole = Annotated[int, Field(gt=0, lt=2**63)]  # what a bigint can hold
Workers = Annotated[int, Field(ge=0, lt=2**31)]


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


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
    devices: list[WireDevices] = []  # absent before nodes reported it: unknown
    cause: Literal["", "machine", "data", "install"] = (
        ""  # absent before nodes reported it: of what was measured
    )
    schema_: Literal[1] = Field(alias="schema")


class _Values(_Wire):
    taken_share: float | None = Field(default=None, ge=0, le=1)
    reference_s: list[Annotated[float, Field(gt=0)]] | None = None
    reference_blocks: Whole | None = None
    reference_spread: float | None = Field(default=None, ge=0)


class _Train(_Values):
    step_s: float = Field(gt=0)
    step_spread: float | None = Field(default=None, ge=0)
    sync_s: float | None = Field(default=None, ge=0)
    input_s: float | None = Field(default=None, ge=0)
    loader_workers: Workers | None = None
    parameters: Whole | None = None
    gradient_bytes: Whole | None = None
    checkpoint_s: float | None = Field(default=None, gt=0)
    checkpoint_bytes: Whole | None = None


class _Learn(_Values):
    losses: list[float]
    steps_a_window: Whole
    diverged: bool


class _Start(_Wire):
    nodes: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(min_length=1)
    step: int = Field(ge=0, lt=2**31)
    lost_steps: int = Field(ge=0, lt=2**31)
    last_unix: Unix | None
    began_unix: Unix
    restore_s: float | None = Field(ge=0)
    restore_bytes: Whole | None


class _Checkpoint(_Wire):
    step: int = Field(gt=0, lt=2**31)
    bytes: Whole
    seconds: float = Field(gt=0)
    ended_unix: Unix
    steps: int = Field(gt=0, lt=2**31)
    steps_s: float = Field(gt=0)


class _Elastic(_Values):
    steps: int = Field(gt=0, lt=2**31)
    first_loss: float
    last_loss: float
    parameters: Whole
    gradient_bytes: Whole
    starts: list[_Start] = Field(min_length=1)
    checkpoints: list[_Checkpoint] = Field(min_length=1)


class _ProfileLine(_Wire):
    batch: int = Field(ge=1, lt=2**31)
    forward_s: float = Field(gt=0)
    backward_s: float = Field(gt=0)
    optimizer_s: float = Field(ge=0)
    input_s: float | None = Field(default=None, ge=0)
    peak_bytes: float | None = Field(default=None, gt=0)


class _Bucket(_Wire):
    bytes: Whole
    ready_fraction: float = Field(ge=0)


class _Profile(_Values):
    parameters: Whole
    gradient_bytes: Whole
    divided_weights: float | None = Field(default=None, gt=0)
    divided_inputs: float | None = Field(default=None, gt=0)
    divided_pairs: float | None = Field(default=None, gt=0)
    rows: list[_ProfileLine] = Field(min_length=1)
    buckets: list[_Bucket]
    loader_workers: Workers | None = None
    load_s: float | None = Field(default=None, ge=0)
    load_wait_s: float | None = Field(default=None, ge=0)
    sample_bytes: float | None = Field(default=None, ge=0)


class _ProbeLine(_Wire):
    bytes: Whole
    seconds: float = Field(gt=0)


class _Probe(_Values):
    rows: list[_ProbeLine] = Field(min_length=1)


_VALUES: dict[str, type[_Wire]] = {
    "train": _Train,
    "learn": _Learn,
    "elastic": _Elastic,
    "profile": _Profile,
    "probe": _Probe,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedLaunch:
    """A launch that is over: the mailbox with its nodes' records, and what the controller knows of it.

    `run_setups`: setups by run_id. `rows`: of runs without a record. `lease` and `machines`: columns of their tables,
    refresh_id still open.
    """

    mailbox: Path
    run_setups: Mapping[str, Mapping[str, Any]]
    rows: Sequence[Mapping[str, Any]] = ()
    lease: Mapping[str, Any] | None = None
    machines: Sequence[Mapping[str, Any]] = ()


@dataclass(slots=True, kw_only=True)
class Collected:
    """What came home: new rows, all rows by status, dollars, and sentences for the reader."""

    new: int = 0
    by_status: Counter[str] = field(default_factory=Counter)
    usd: float = 0.0
    notes: list[str] = field(default_factory=list)

    def add(self, other: Collected) -> None:
        """Count what came from elsewhere too."""
        self.new += other.new
        self.by_status.update(other.by_status)
        self.usd += other.usd
        self.notes += other.notes


def load_mailbox(
    warehouse: Warehouse, launch: EndedLaunch, *, refresh_id: str, now: datetime
) -> Collected:
    """Load the records in the mailbox of `launch` and what its controller knows; dollars are left to the caller.

    `notes` has a sentence for each rejected record and for each machine that left files behind. Raises WarehouseBusy;
    then nothing was loaded and the records lie where they were.
    """
    bodies: list[dict[str, Any]] = []
    refused: dict[Path, str] = {}
    for file in sorted(launch.mailbox.glob("node-*/records/*.json")):
        try:
            bodies.append(_record(file, launch))
        except ValueError as error:
            refused[file] = str(error)
    bodies.sort(key=lambda body: body["status"] != "measured")
    unsound = [
        _unsound(file, reason, launch)
        for file, reason in refused.items()
        if file.stem in launch.run_setups
    ]
    bodies += [{"ended_unix": now.timestamp()} | row for row in [*map(dict, launch.rows), *unsound]]
    distinct = {body["run_id"]: body for body in reversed(bodies)}  # the first of a run_id stays
    with warehouse.transact() as connection:
        new = append_records(
            connection, list(distinct.values()), refresh_id=refresh_id, loaded_at=now
        )
        if launch.lease is not None:
            append(connection, "raw_leases", [launch.lease], refresh_id=refresh_id)
        append(connection, "raw_machines", launch.machines, refresh_id=refresh_id)
    notes = [_quarantine(file, reason) for file, reason in refused.items()]
    notes += map(_not_carried, sorted(launch.mailbox.glob("node-*/refused.json")))
    return Collected(
        new=new, by_status=Counter(str(body["status"]) for body in distinct.values()), notes=notes
    )


def _record(file: Path, launch: EndedLaunch) -> dict[str, Any]:
    """The sound record in `file` with its setup. Raises ValueError saying what is wrong."""
    try:
        # a loss may be NaN, which JSON lacks: unknown; a NaN time is then missing and refused below
        body = json_of_node(file.read_text(), parse_constant=lambda _: None)
    except (ValueError, IsADirectoryError) as error:
        raise ValueError(f"it is truncated or not JSON ({error})") from None
    try:
        json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ValueError(f"it cannot be stored ({error})") from None
    try:
        record = WireRecord.model_validate(body)
        if record.status == "measured":
            _VALUES[record.kind].model_validate(record.values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ValueError(f"{where}: {first['msg']}") from None
    if record.run_id != file.stem:
        raise ValueError(f"it calls itself {record.run_id}")
    if record.run_id not in launch.run_setups:
        raise ValueError("no run of that id was planned for this launch")
    setup = dict(launch.run_setups[record.run_id])
    wrong = wrong_device(
        [Devices(**one) for one in setup.get("expected_devices", ())],
        [Devices(**one.model_dump()) for one in record.devices],
    )
    lease_id = (
        launch.lease["lease_id"] if launch.lease else record.lease_id
    )  # of its machine, whatever it says
    return (
        dict(body)
        | {"setup": setup, "lease_id": lease_id}
        | ({"wrong_device": wrong} if wrong else {})
    )


def _unsound(file: Path, reason: str, launch: EndedLaunch) -> dict[str, Any]:
    """The row of a run whose record cannot be read."""
    setup = dict(launch.run_setups[file.stem])
    return {
        "run_id": file.stem,
        "lease_id": str(launch.lease["lease_id"]) if launch.lease else file.parents[2].name,
        "kind": setup.get("kind")
        or (
            "probe"
            if not setup.get("workload")
            else "train"
            if setup.get("batch_per_device")
            else "profile"
        ),
        "status": "failed",
        "reason": f"its record could not be read: {reason}",
        "setup": setup,
    }


def _quarantine(file: Path, reason: str) -> str:
    """Move `file` to rejected/ beside the nodes' folders, with a note; returns the sentence that says so."""
    node = file.parents[1].name
    target = file.parents[2] / "rejected" / f"{node}-{file.name}"
    sentence = f"record {file.stem} of {node} was not loaded: {reason}; it lies in {target}"
    with suppress(
        OSError
    ):  # a full disk must not stop the load: the record is then refused again next time
        target.parent.mkdir(exist_ok=True)
        file.replace(target)
        target.with_suffix(".txt").write_text(sentence + "\n")
    return sentence


def _not_carried(file: Path) -> str:
    """What a machine says of files that it did not upload. Its word: anything may stand there."""
    try:
        body = read_object(file) or {}
    except OSError:  # the rows are in the warehouse by now: what cannot be read stops nothing
        body = {}
    reason = str(body.get("reason", "it does not say which"))
    printable = "".join(one for one in reason[:_MOST_SAID] if one.isprintable())
    return f"{file.parent.name} left files behind: {printable}"
