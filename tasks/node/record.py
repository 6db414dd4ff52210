"""The wire: the plan that a controller writes and the records that nodes write back, as JSON.

Standard library only. Files of the mailbox, a directory or, for EC2, a prefix of S3; `a` is the
attempt, counted from 1:

    controller
        plan.json           the Plan; rewritten with a higher attempt to try again
        go-<a>.json         start measuring; `order`: nodes in the order of ranks, or empty; `why`
        done.json           leave
        workloads/<digest>.py, workloads/<digest>.tar.gz   a workload's file or folder
        data.json           addresses of S3 that machines fetch
    node-<i>/, agent
        ready.json          address, torch's version, fingerprint
        heartbeat.json      rewritten every second
        finished-<a>.json   exit_code of torchrun, worker_exit_code (negative: a signal; else as in
                            processes.py), reason, run_id, log_tail
        log-<a>.txt         torchrun's output
    node-<i>/, worker
        armed-<a>.json      process group joined, waiting for go; the first machine adds `pairs`,
                            the links that probe.pairs measured, if the plan asks for them
        progress.json       attempt, run_id and index of the item under way
        records/<run_id>.json   a record, by the run's first node or by the node that failed
    node-<i>/, courier
        data.json           progress of the data that it fetches
        notice.json         EC2's notice that the machine goes
        refused.json        why files of this machine were left behind
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from .machine import fingerprint, torch_version
from .processes import EXIT_MAILBOX, leave

LEARN = "learn"
ELASTIC = "elastic"
TRAINING = ("train", LEARN, ELASTIC)  # kinds of items that train on all of their devices together
CPU = "cpu"  # a machine's processor, as torch names that kind of device
MACHINE, DATA, INSTALL = "machine", "data", "install"  # of a failure's cause
_DATA_MISSING = "DataMissing: "  # a reason that data.py gave begins so, after launch.explain
_PACKED = ".tar.gz"
ANY = "any"  # whatever there is: of machines that only stand in for others, as in an emulation


@dataclass(frozen=True, kw_only=True)
class WorkloadFile:
    """A workload: a file in the mailbox, the function in it, and the function's arguments.

    source: the user's name of the file, for messages.
    file: a Python file, or an archive. The node unpacks an archive and imports `module` with the
        folder on Python's path; without a `module` it loads the file `source` of the folder.
    requirements: the requirements file in the archive.
    requirements_digest: of all that installing reads.
    environment: the folder of the installed requirements; empty if the node installs them.
    env: variables that the code sees.
    data: a folder, or an address of S3, whose place on the machine the function gets as its
        argument `data` (data.py); empty if it takes none. `data_digest` names it.
    """

    name: str
    digest: str
    file: str  # relative to the mailbox
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    module: str = ""
    requirements: str = ""
    requirements_digest: str = ""
    environment: str = ""
    env: dict[str, str] = field(default_factory=dict)
    data: str = ""
    data_digest: str = ""

    @property
    def folder(self) -> str:
        """The unpacked folder's name; empty if `file` is no archive."""
        return self.file.removesuffix(_PACKED) if self.file.endswith(_PACKED) else ""

    @property
    def process_key(self) -> tuple[Any, ...]:
        """Workloads with equal keys can share a process; an empty key shares with any plain one."""
        needs = (self.folder, self.requirements_digest, tuple(sorted(self.env.items())))
        return needs if any(needs) else ()


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices of one kind on one machine: name, number, and the threads of each of its ranks.

    A plan states the devices that the machine was bought for, by the provider's name, CPU or ANY;
    `threads` 0 means one for each core. A record states the devices of a run, by torch's names.
    """

    name: str
    count: int
    threads: int = 1

    @property
    def checked(self) -> bool:
        """True if a machine must look for them before it starts."""
        return self.name not in (CPU, ANY)


@dataclass(frozen=True, kw_only=True)
class Item:
    """A run. `kind` is one of TRAINING, profile or probe.

    nodes: take part, by index in ascending order.
    devices: used on each of `nodes`, the first ones of the machine; empty: one each. A node starts
        as many ranks as its largest item has devices there.
    batches: of train, learn and elastic, samples per device and micro-step, by node. Of profile,
        which runs on one device of one node, the batch sizes to profile.
    message_bytes: of probe, the sizes to all-reduce.

    learn trains as train does: `most_steps` in `windows` of equal length, from `seed`, or as many
    as fit in `most_s` seconds. Losses of the same seed, nodes, devices and batches can be compared.

    elastic trains as train does, and is the only item of its plan. The nodes that are there share
    out the global batch, with a checkpoint every `checkpoint_every` of `most_steps`. When a node is
    lost, the others wait `wait_s` for a replacement. The first node must stay.
    """

    run_id: str
    kind: str
    nodes: list[int]
    workload: str = ""
    batches: list[int] = field(default_factory=list)
    accumulation_steps: int = 1
    strategy: str = "ddp"
    precision: str = "fp32"
    switches: str = "none"
    message_bytes: list[int] = field(default_factory=list)
    warmup_steps: int = 2
    least_steps: int = 8
    most_steps: int = 20
    most_s: float = 6.0
    seed: int = 0
    devices: list[int] = field(default_factory=list)
    windows: int = 10
    checkpoint_every: int = 0
    wait_s: float = 2.0

    @property
    def used(self) -> list[int]:
        return self.devices or [1] * len(self.nodes)

    @property
    def needs(self) -> list[int]:
        """Nodes without which it cannot run."""
        return self.nodes[:1] if self.kind == ELASTIC else self.nodes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one launch serves: its nodes' addresses, the workloads' files, and the items in order.

    expected: the devices that each node was bought for. It measures on those or fails.
    timeout_s: of one collective: a lost link must not hang for half an hour.
    join_s: how long nodes wait for each other at the start: a new machine reads torch from a slow
        disk. A node that looks for its devices before may take as long for that.
    prepare_s: for nodes that install requirements.
    patience_s: for repeating disturbed measurements (measuring.py).
    ranks: the nodes that take part in this attempt, in ascending order; empty: all.
    pairs: True if machines first measure the links between each two of them.
    checkpoints: the folder of an elastic item, which all nodes see and which outlives them.
    """

    lease_id: str
    attempt: int
    addresses: list[str]
    expected: list[Devices]  # without a default: whoever makes a plan decides
    workloads: list[WorkloadFile]
    items: list[Item]
    port: int = 29500
    timeout_s: float = 60.0
    join_s: float = 60.0
    prepare_s: float = 0.0
    patience_s: float = 0.0
    ranks: list[int] = field(default_factory=list)
    pairs: bool = False
    checkpoints: str = ""

    @property
    def elastic(self) -> Item | None:
        """The elastic item, which is the only one of its plan; None if it is another plan."""
        return next((item for item in self.items if item.kind == ELASTIC), None)

    def workload(self, item: Item) -> WorkloadFile | None:
        """The item's workload; None for a probe."""
        return next((file for file in self.workloads if file.name == item.workload), None)

    @property
    def meet_s(self) -> float:
        """Seconds that a node waits for the others' torchrun: they may check devices and
        install.
        """
        checks = any(devices.checked for devices in self.expected)
        return self.join_s * (2 if checks else 1) + self.prepare_s


LEAST_ORDERED = 4  # machines: in a ring of fewer each has the same neighbours in any order


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The ranks of torchrun, node by node: `devices` of each node that takes part, by its index in
    the cluster.

    Ranks count through the devices of the first node that takes part, then of the second, as
    torchrun's static rendezvous numbers them. A node has as many ranks as the item that uses most
    of its devices needs. Those of an item of LEAST_ORDERED nodes or more send to each other in the
    order of nodes `sending`; empty: as they come.
    """

    devices: Mapping[int, int]
    sending: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: Plan) -> RankLayout:
        """Return the layout of `plan`. Raises ValueError if an item needs a node that takes no
        part.
        """
        devices = dict.fromkeys(plan.ranks or range(len(plan.addresses)), 1)
        for item in plan.items:
            for node, used in zip(item.nodes, item.used, strict=True):
                if node in devices:
                    devices[node] = max(devices[node], used)
                elif node in item.needs:
                    raise ValueError(f"{item.run_id} needs node {node}, which takes no part")
        return cls(devices=devices)

    @property
    def places(self) -> list[tuple[int, int]]:
        """(node, device) of each rank."""
        return [(node, device) for node, count in self.devices.items() for device in range(count)]

    @property
    def host(self) -> int:
        """The node at which the others meet."""
        return next(iter(self.devices))

    def ranks(self, item: Item) -> tuple[int, ...]:
        """Ranks of `item`, in ascending order: the first devices of each of its nodes."""
        used = dict(zip(item.nodes, item.used, strict=True))
        return tuple(
            rank for rank, (node, device) in enumerate(self.places) if device < used.get(node, 0)
        )

    def placed(self, item: Item) -> Item:
        """Return `item` with nodes, devices and batches in the sending order."""
        if not self.sending or len(item.nodes) < LEAST_ORDERED:
            return item
        by_node = {"nodes": item.nodes, "devices": item.devices}
        if item.kind in TRAINING:
            by_node["batches"] = item.batches
        order = sorted(range(len(item.nodes)), key=lambda i: self.sending.index(item.nodes[i]))
        moved = {name: [values[i] for i in order] for name, values in by_node.items() if values}
        return replace(item, **moved)  # type: ignore[arg-type]

    def sending_ranks(self, item: Item) -> tuple[int, ...]:
        """Ranks of `item` in the sending order."""
        ranks, nodes = self.ranks(item), self.placed(item).nodes
        return tuple(sorted(ranks, key=lambda rank: nodes.index(self.places[rank][0])))

    def label(self, rank: int) -> str:
        """A rank's node, and its device if the node has several at work."""
        node, device = self.places[rank]
        return f"node {node}" if self.devices[node] == 1 else f"node {node} device {device}"


def plan_from_json(text: str) -> Plan:
    """Parse a plan. Raises TypeError or KeyError for unknown fields."""
    body = json.loads(text)
    for name, kind in (("workloads", WorkloadFile), ("items", Item), ("expected", Devices)):
        body[name] = [kind(**fields) for fields in body[name]]
    return Plan(**body)


def task_of_process() -> tuple[Path, Plan, int]:
    """Return mailbox, plan and node, which the agent states in this process's environment."""
    plan = plan_from_json(Path(os.environ["SRIFT_PLAN"]).read_text())
    return Path(os.environ["SRIFT_MAILBOX"]), plan, int(os.environ["SRIFT_NODE"])


def record_of(
    plan: Plan,
    item: Item,
    *,
    started_unix: float,
    problem: str,
    values: dict[str, Any] | None = None,
    devices: Sequence[Devices] = (),
) -> dict[str, Any]:
    """Return the record of `item`: "failed" if there is a `problem`, else "measured".

    In `problem`, the kind of an error stands before its message. `devices` served the run, one
    entry a node. `cause` of a failure: MACHINE if the machine lacked its devices, DATA if the
    workload's data were not on it, INSTALL if no index answered or the time was up. "": the
    workload is at fault. tasks/execution/record_loader.py has the types.
    """
    workload = plan.workload(item)
    return {
        "run_id": item.run_id,
        "lease_id": plan.lease_id,
        "attempt": plan.attempt,
        "kind": item.kind,
        "status": "failed" if problem else "measured",
        "reason": problem,
        "item": asdict(item),
        "workload_digest": "" if workload is None else workload.digest,
        "started_unix": started_unix,
        "ended_unix": time.time(),
        "fingerprint": fingerprint(),
        "torch_version": torch_version(),
        "values": (not problem and values) or {},
        "devices": list(map(asdict, devices)),
        "cause": DATA if _DATA_MISSING in problem else "",
    }


def fail_runs(
    mailbox: Path, plan: Plan, node: int, *, code: int, reason: str, cause: str
) -> NoReturn:
    """Write a failed record for each run that needs `node`, and end with `code`."""
    try:
        for item in plan.items:
            if node in item.nodes:
                problem = f"node {node}: {reason}"
                record = record_of(plan, item, started_unix=time.time(), problem=problem)
                path = mailbox / f"node-{node}" / "records" / f"{item.run_id}.json"
                write_json(path, record | {"cause": cause})
    except OSError as full:
        code, reason = EXIT_MAILBOX, f"no record could be written ({full.strerror}); {reason}"
    leave(code, reason)


def write_json(path: Path, body: Any) -> None:
    """Write a dictionary or a dataclass as `write_file` does. Raises OSError."""
    write_file(path, json.dumps(body if isinstance(body, dict) else asdict(body)).encode())


def write_file(path: Path, content: bytes) -> None:
    """Write beside, flush to disk, rename: a reader sees all of it or nothing. Raises OSError.

    No link in the folder is followed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)
