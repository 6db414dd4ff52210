"""Define the plan that a controller writes, the records that nodes write back, and their JSON.

The controller is the process that launched the nodes (machines). Controller and nodes exchange
files through the mailbox, which is a folder or, on EC2, an S3 prefix. An attempt is one start of
torchrun on all nodes that take part. In the file names below, <a> is the number of the attempt,
counted from 1. Each node runs an agent, which starts torchrun. torchrun starts a worker for each
rank. This module imports only the standard library.

    written by the controller
        plan.json           the Plan; a higher attempt number in this file starts a new attempt
        go-<a>.json         starts the measurement; `order`: the nodes in the order of the
                            all-reduce ring, or empty; `why`: the reason for the order
        done.json           ends the agents
        workloads/<digest>.py, workloads/<digest>.tar.gz   a workload's file or folder
        data.json           S3 addresses of the data that machines download
    node-<i>/, written by the agent
        ready.json          the machine's IP address
        heartbeat.json      the time; rewritten every second
        finished-<a>.json   exit_code of torchrun, worker_exit_code (a negative code is a signal;
                            processes.py defines other codes), reason, run_id, log_tail
        log-<a>.txt         torchrun's output
    node-<i>/, written by a worker
        armed-<a>.json      the node's ranks have joined the process group and wait for go-<a>.json;
                            `pairs`: the result of probe.pairs, if the plan requests it
        progress.json       attempt and run_id of the current run
        records/<run_id>.json   the record of a run, from the run's first node or a node that failed
    node-<i>/, written by the courier (a root process on EC2)
        data.json           progress of the downloads
        notice.json         EC2's notice that it will end the spot machine
        refused.json        why files of this machine were not uploaded
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from .machine import fingerprint
from .processes import leave

LEARN = "learn"
ELASTIC = "elastic"
TRAINING = ("train", LEARN, ELASTIC)  # kinds of items that train on all their devices together
CPU = "cpu"  # torch's name of the CPU as a device
MACHINE, DATA, INSTALL = "machine", "data", "install"  # causes of a failure
_DATA_MISSING = "DataMissing: "  # part of the reason of a failure, from launch.explain
LEAST_ORDERED = 4  # minimum number of machines for which the order of the all-reduce ring matters
ANY = "any"  # any device; for an emulated EC2, whose machines lack their instance types' devices


@dataclass(frozen=True, kw_only=True)
class WorkloadFile:
    """A workload in a plan: a file with code, the function to call, and its arguments.

    digest: hash of the code, function, arguments, requirements, environment variables and data.
    file: path of a Python file, or of a .tar.gz archive that a node unpacks. The path is relative
        to the mailbox, the folder that controller and nodes share.
    source: path of the code file in the user's folder, such as "models/mine.py". An archive has
        the code file at the same path.
    module: name of the module that a node imports from the archive, such as "models.mine". If it is
        empty, a node loads the code file by its path.
    requirements: path of the requirements file in the archive.
    requirements_digest: hash of all files that pip reads.
    environment: path of the virtual environment with the requirements; empty if the node installs
        them.
    env: environment variables for the code.
    data: a folder or an S3 address; empty if the function takes no data (see data_paths.py).
    data_digest: hash that identifies the data.
    """

    name: str
    digest: str
    file: str
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
        """Return the name of the unpacked folder; empty if `file` is not an archive."""
        return self.file.rpartition(".tar.gz")[0]

    @property
    def process_key(self) -> tuple[Any, ...]:
        """Return a tuple that is equal for workloads that can run in the same process."""
        needs = (self.folder, self.requirements_digest, tuple(sorted(self.env.items())))
        return needs if any(needs) else ()


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices of one kind on one machine.

    In a plan, these are the required devices. In a record, these are the devices that a run used.

    name: the device. In a plan, it is the constant CPU, the constant ANY for any device, or the
        provider's name of a GPU. In a record, it is torch's name of the device.
    threads: CPU threads of each rank. In a plan, 0 means one thread per core.
    """

    name: str
    count: int
    threads: int = 1

    @property
    def checked(self) -> bool:
        """Return True if nodes check this device before torchrun starts. They check only GPUs."""
        return self.name not in (CPU, ANY)


@dataclass(frozen=True, kw_only=True)
class Item:
    """One measurement run of a plan.

    Values of `kind`:

    profile: time the phases of a step for several batch sizes, on one device with ddp.
    probe: time all-reduces between devices.
    train: time training steps.
    learn: train `most_steps` steps in `windows` equal windows, and record each window's mean loss.
        The run ends early after the window in which `most_s` seconds have passed. Losses are
        comparable between runs with the same seed, nodes, devices and batches.
    elastic: train `most_steps` steps, even if nodes are lost. Only the first node must not be lost.
        After a loss, the remaining nodes wait `wait_s` seconds for a replacement. Then the
        remaining and new nodes divide the global batch. A checkpoint is written every
        `checkpoint_every` steps. An elastic run is the only run of its plan. It uses ddp without
        switches.

    Other fields:

    nodes: indices of the nodes that take part, in ascending order.
    devices: the number of devices that the run uses on each of `nodes`. Empty means one device per
        node.
    batches: the samples per device and micro-step on each of `nodes`. For kind profile, the batch
        sizes to profile, in ascending order.
    message_bytes: for kind probe, the sizes in bytes of the messages to all-reduce.
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
        """Return a list with the number of devices that the run uses on each of `nodes`."""
        return self.devices or [1] * len(self.nodes)

    @property
    def batch_by_rank(self) -> list[int]:
        """Return a list with the samples per micro-step of each rank."""
        pairs = zip(self.batches, self.used, strict=True)
        return [batch for batch, used in pairs for _ in range(used)]

    @property
    def needs(self) -> list[int]:
        """Return the nodes that must not be lost during the run.

        An elastic run needs only its first node. Other runs need all their nodes.
        """
        return self.nodes[:1] if self.kind == ELASTIC else self.nodes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The work of one launch of torchrun: node addresses, workloads and runs.

    expected: the devices that each node must have.
    port: torchrun's port on the first node is this number plus the attempt number.
    timeout_s: seconds after which a collective fails.
    join_s: maximum seconds that nodes wait for each other at the start. Before this wait, a
        node checks its GPUs for at most `join_s` seconds.
    prepare_s: maximum seconds that nodes take to install requirements.
    patience_s: seconds, shared by all runs, for repeating measurements that other virtual machines
        disturbed (see repetition.Patience).
    ranks: the indices of the nodes that take part in this attempt, in ascending order; empty means
        all nodes.
    pairs: True to measure the link between each pair of machines before the runs.
    checkpoints: the checkpoint folder of an elastic run, which all nodes share and which outlives
        the nodes.
    """

    lease_id: str
    attempt: int
    addresses: list[str]
    expected: list[Devices]
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
        """Return the elastic run, the only run of its plan; None if the plan has no such run."""
        return next((item for item in self.items if item.kind == ELASTIC), None)

    def workload(self, item: Item) -> WorkloadFile | None:
        """Return the workload of a run; None for a probe of the network."""
        return next((file for file in self.workloads if file.name == item.workload), None)

    @property
    def meet_s(self) -> float:
        """Return the maximum seconds that a node's torchrun waits for the other nodes.

        The other nodes may first check their GPUs and install requirements.
        """
        checks = any(devices.checked for devices in self.expected)
        return self.join_s * (2 if checks else 1) + self.prepare_s

    @property
    def rank_counts(self) -> dict[int, int]:
        """Return {node: number of ranks} for the nodes that take part in this attempt.

        The number of ranks is the largest number of devices that a run uses on the node, and at
        least 1. Nodes are in ascending order, which is also the order of torchrun's ranks.
        """
        counts = dict.fromkeys(self.ranks or range(len(self.addresses)), 1)
        for item in self.items:
            for node, used in zip(item.nodes, item.used, strict=True):
                if node in counts:
                    counts[node] = max(counts[node], used)
        return counts

    @property
    def places(self) -> list[tuple[int, int]]:
        """Return a list with (node, index of the device on the node) for each rank."""
        return [(node, place) for node, count in self.rank_counts.items() for place in range(count)]

    @property
    def host(self) -> int:
        """Return the first node of this attempt, to which the other nodes connect."""
        return min(self.rank_counts)

    def ranks_of(self, item: Item) -> tuple[int, ...]:
        """Return the ranks of the run `item`, in the order of its nodes."""
        places, used = self.places, zip(item.nodes, item.used, strict=True)
        return tuple(places.index((node, place)) for node, count in used for place in range(count))

    def label(self, rank: int) -> str:
        """Return the name of a rank for messages, such as "node 1" or "node 1 device 0"."""
        node, device = self.places[rank]
        return f"node {node}" if self.rank_counts[node] == 1 else f"node {node} device {device}"


def plan_from_json(text: str) -> Plan:
    """Parse a plan from JSON.

    Raises KeyError if `workloads`, `items` or `expected` is missing. Raises TypeError if any other
    required field is missing, or if a field is unknown.
    """
    body = json.loads(text)
    for name, kind in (("workloads", WorkloadFile), ("items", Item), ("expected", Devices)):
        body[name] = [kind(**fields) for fields in body[name]]
    return Plan(**body)


def task_of_process() -> tuple[Path, Plan, int]:
    """Return (mailbox folder, plan, node's index), read from environment variables."""
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
    """Return the record of a run. Its fields are described in tasks/execution/record_loader.py.

    problem: why the run failed; "" for a measured run.
    values: the measured values; None for a failed run. `not_compared`, which says why the losses
        were not compared with ddp's, becomes the `reason` of a measured run.
    devices: the devices that the run used, one entry per node.

    The record's field `cause` is DATA if the workload's data were missing, else "".
    """
    workload = plan.workload(item)
    return {
        "run_id": item.run_id,
        "lease_id": plan.lease_id,
        "attempt": plan.attempt,
        "kind": item.kind,
        "status": "failed" if problem else "measured",
        "reason": problem or (values or {}).get("not_compared", ""),
        "item": item,
        "workload_digest": "" if workload is None else workload.digest,
        "started_unix": started_unix,
        "ended_unix": time.time(),
        "fingerprint": fingerprint(),
        "torch_version": version("torch"),
        "values": values or {},
        "devices": devices,
        "cause": DATA if _DATA_MISSING in problem else "",
    }


def fail_runs(code: int, reason: str, cause: str) -> NoReturn:
    """Record each run that uses this node as failed, and exit with `code`.

    reason: the error message.
    cause: why the runs failed. MACHINE means that the machine lacks the expected devices. INSTALL
        means that the package index did not respond, or that the installation took too long. ""
        means that the workload is the cause.
    """
    mailbox, plan, node = task_of_process()
    for item in plan.items:
        if node in item.nodes:
            problem = f"node {node}: {reason}"
            record = record_of(plan, item, started_unix=time.time(), problem=problem)
            path = mailbox / f"node-{node}/records/{item.run_id}.json"
            write_json(path, record | {"cause": cause})
    leave(code, reason)


def write_json(path: Path, body: Any) -> None:
    """Write `body` as JSON to the file `path` atomically. `body` may contain dataclasses.

    Raises OSError if the file cannot be written.
    """
    write_file(path, json.dumps(body, default=asdict).encode())


def write_file(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically, so that readers never see an incomplete file.

    The content is flushed to disk. A symbolic link at `path` is replaced, not followed. Raises
    OSError if the file cannot be written or renamed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    try:
        with beside.open("xb") as file:  # follows no link
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)
