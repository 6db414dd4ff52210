"""Manage one rank of a torchrun launch: create groups, wait for other ranks, and write reports.

An item is one measurement run of the plan. The items run in these orders:

- A node runs its items one after another, even if the items use different devices.
- Different nodes run single-node items at the same time, because these items use no network.
- A multi-node item starts after all earlier items have ended. Later items start after it has ended.

When an item ends, its first rank stores the item's `run_id` as a key in torchrun's TCPStore. Other
ranks wait for this key without using CPU time.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .data_paths import data_path
from .device import backend, device_of_rank, name_of
from .entrypoint import LoadedWorkload, build, user_line
from .precision import Arithmetic
from .probe import pairs
from .processes import EXIT_LOST_PEER, EXIT_MAILBOX, leave
from .record import (
    LEAST_ORDERED,
    Devices,
    Item,
    WorkloadFile,
    record_of,
    task_of_process,
    write_json,
)
from .reference import Reference
from .repetition import Patience
from .strategies.replicas import of_ranks

# torch 2.13 and later can create groups with any order of ranks
_ORDERS = "sort_ranks" in signature(dist.new_group).parameters


class Worker:
    """A worker process of torchrun, which runs the plan on one device of a machine.

    reports: True for the first rank of a node, which writes armed-<attempt>.json and progress.json.
    devices: {node: the kind of device that the node uses}. A Worker assumes that all nodes use the
        same kind of device as this rank. The subclass Launch gathers the kinds from all ranks.
    """

    def __init__(self) -> None:
        """Select this rank's device. Raises RuntimeError if the device is gone."""
        self.mailbox, self.plan, self.node = task_of_process()
        self.device = device_of_rank(self.plan.expected[self.node])
        mine = Devices(name=name_of(self.device), count=1, threads=torch.get_num_threads())
        self.devices = dict.fromkeys(range(len(self.plan.addresses)), mine)
        self.started_unix = time.time()
        self.rank = int(os.environ["RANK"])
        self.master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.reports = os.environ["LOCAL_RANK"] == "0"

    def load(self, item: Item, *, shared: bool = False) -> LoadedWorkload:
        """Build the workload of the run `item` on this rank.

        shared: True to leave the model in host memory until a strategy shards it.

        Raises DataMissing if the workload's data are not on this machine, and NoSuchPrecision if
        the device does not support the run's precision. Also raises WorkloadError, LoaderError and
        the errors of the user's code (see entrypoint.build).
        """
        workload = self.plan.workload(item)
        assert workload is not None
        return build(
            self.mailbox / f"node-{self.node}" / "scratch" if workload.folder else self.mailbox,
            replace(workload, data=data_path(self.mailbox, workload)),
            seed=item.seed,
            rank=self.rank,
            computing=Arithmetic(item.precision, self.device),
            shared=shared,
        )

    def wait_for_go(self, armed: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for the controller's file `go-<attempt>.json`, and return its content.

        Before the wait, the first rank of each node writes `armed` as JSON to the file
        `armed-<attempt>.json`. This file tells the controller that the node is ready.
        """
        if self.reports:
            self.report(f"armed-{self.plan.attempt}.json", armed)
        go = self.mailbox / f"go-{self.plan.attempt}.json"
        while not go.exists():
            time.sleep(0.05)
        return dict(json.loads(go.read_text()))

    def begin(self, item: Item) -> None:
        """Write progress.json, which tells the controller that the run `item` begins."""
        self.started_unix = time.time()
        if self.reports:
            self.report("progress.json", {"attempt": self.plan.attempt, "run_id": item.run_id})

    def write_record(
        self, item: Item, problem: str = "", values: dict[str, Any] | None = None
    ) -> None:
        """Write the record of the run `item` to the mailbox.

        problem: why the run failed; "" for a measured run.
        values: the measured values of a measured run.
        """
        used = zip(item.nodes, item.used, strict=True)
        record = record_of(
            self.plan,
            item,
            started_unix=self.started_unix,
            problem=problem,
            values=values,
            devices=[replace(self.devices[node], count=count) for node, count in used],
        )
        self.report(f"records/{item.run_id}.json", record)

    def report(self, name: str, body: Mapping[str, Any]) -> None:
        """Write `body` as JSON to the file `name` in the node's folder of the mailbox.

        If the file cannot be written, this process exits with EXIT_MAILBOX.
        """
        path = self.mailbox / f"node-{self.node}" / name
        try:
            write_json(path, body)
        except OSError as error:
            leave(
                EXIT_MAILBOX,
                f"node {self.node} could not write {path}: {error.strerror}; free some space there",
            )


class Launch(Worker):
    """One rank of a torchrun launch, with its plan, its store and its process groups.

    store: torchrun's TCPStore, in which the first rank of a run notes that the run has ended.
    written: names of the workloads for which this rank has timed a checkpoint.
    compared: {workload, strategy, precision and ranks: why the losses were not compared with ddp's;
        "" if they are equal}. A key is a string such as "mlp zero1 fp32 (0, 1)".
    order: the nodes in the order of the all-reduce ring; [] means ascending order.
    pairs: the measured links between nodes (see probe.pairs). Only the first rank of each node has
        them. {} if the plan does not request the measurement, or if torch is older than 2.13.
    """

    def __init__(self) -> None:
        """Create a process group of all ranks and a process group for each run; warm up torch.

        Raises RuntimeError if this rank's device is gone.
        """
        super().__init__()
        plan = self.plan
        self.written: set[str] = set()
        self.compared: dict[str, str] = {}
        self.order: list[int] = []
        timeout = timedelta(seconds=plan.join_s)
        dist.init_process_group(backend(self.device), timeout=timeout)
        # torchrun's store outlives the workers of other nodes. The process groups use the first
        # connection to this store. This second connection may block while a rank waits for a key.
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            *self.master, is_master=False, timeout=timedelta(days=1)
        )
        wanted = {plan.ranks_of(item) for item in plan.items} | {
            (rank,) for rank in range(dist.get_world_size())
        }
        self.groups = {members: self._group(members) for members in sorted(wanted)}
        rehearse(self.groups[(self.rank,)], self.device)
        self.pairs: dict[str, Any] = {}
        if plan.pairs and _ORDERS:
            firsts = [plan.places.index((node, 0)) for node in plan.rank_counts]
            between = dist.new_group(firsts, timeout=timeout, backend="gloo")
            if self.reports:
                self.pairs = pairs(between) | {"nodes": list(plan.rank_counts)}
        self.devices |= of_ranks((self.node, self.devices[self.node]), dist.group.WORLD)
        self.patience = Patience(left_s=plan.patience_s, reference=Reference(self.device))

    def _group(self, ranks: tuple[int, ...], **order: Any) -> dist.ProcessGroup:
        """Create the process group of `ranks`. Every rank of the launch must call this method.

        order: further keyword arguments of torch's `new_group`, such as `sort_ranks`.
        """
        timeout = timedelta(seconds=self.plan.timeout_s)
        return dist.new_group(  # type: ignore[no-any-return]
            list(ranks), timeout=timeout, backend=backend(self.device), **order
        )

    def take_order(self, go: Mapping[str, Any]) -> None:
        """Recreate the runs' process groups with the nodes in the order of the all-reduce ring.

        Every rank must call this method. `go` is the content of `go-<attempt>.json`. Its entry
        `order` lists the nodes in ring order. If `order` is empty, the groups do not change.
        """
        self.order, ranks = go["order"], self.plan.ranks_of
        ordered = {ranks(item): ranks(self.in_ring_order(item)) for item in self.plan.items}
        for members, ring in sorted(ordered.items()):
            if ring != members:
                self.groups[members] = self._group(ring, sort_ranks=False)

    def in_ring_order(self, item: Item) -> Item:
        """Return `item` with its nodes, devices and batches in the order of the all-reduce ring.

        The result is `item` itself if no ring order is set, or if the run has fewer than
        LEAST_ORDERED nodes.
        """
        if not self.order or len(item.nodes) < LEAST_ORDERED:
            return item
        by_node = {"nodes": item.nodes, "devices": item.devices, "batches": item.batches}
        places = sorted(range(len(item.nodes)), key=lambda i: self.order.index(item.nodes[i]))
        moved = {name: [values[i] for i in places] for name, values in by_node.items() if values}
        return replace(item, **moved)  # type: ignore[arg-type]

    @property
    def label(self) -> str:
        return self.plan.label(self.rank)

    def leads(self, item: Item) -> bool:
        """Return True if this rank is the first rank of the run `item`, which writes the record."""
        return self.rank == self.plan.ranks_of(item)[0]

    def group(self, item: Item) -> dist.ProcessGroup | None:
        """Return the process group of the run `item`; None if the run has only one rank."""
        ranks = self.plan.ranks_of(item)
        return self.groups[ranks] if len(ranks) > 1 else None

    def by_rank(self, item: Item, values: Sequence[Any]) -> list[Any]:
        """Return `values` in ascending order of rank.

        `values` has one value per rank of the run `item`, in the order of the all-reduce ring.
        """
        ring = self.plan.ranks_of(self.in_ring_order(item))
        return [value for _, value in sorted(zip(ring, values, strict=True))]

    def wait_for(self, items: Iterable[Item]) -> None:
        """Wait until the runs `items` have ended.

        Exits with EXIT_LOST_PEER if a run was aborted or the shared store cannot be reached.
        """
        for item in items:
            try:
                end = self.store.get(item.run_id)  # waits for the key
            except dist.DistError as error:
                leave(EXIT_LOST_PEER, f"torchrun's store cannot be reached: {explain(error)}")
            if end == b"abort":
                leave(EXIT_LOST_PEER, f"{item.run_id} failed on another node")


def rehearse(alone: dist.ProcessGroup, device: torch.device) -> None:
    """Warm up torch with two tiny training steps.

    alone: a process group with only this rank.
    """
    # The first step of a process takes about one second longer, which no measurement may include.
    model = torch.nn.Linear(2, 2, device=device)
    optimizer = torch.optim.Adam(model.parameters())
    parallel = DistributedDataParallel(model, process_group=alone)
    for _ in range(2):
        parallel(torch.zeros(1, 2, device=device)).sum().backward()
        optimizer.step()


def explain(error: BaseException, workload: WorkloadFile | None = None) -> str:
    """Return a one-line description of `error` and of the line of user code that raised it.

    An example is "ValueError: bad shape (mine.py, line 14, in make_batch)". The part in parentheses
    is left out if `workload` is None or no line of user code is known.
    """
    text = str(getattr(error, "msg", error)).strip()  # a SyntaxError's `msg` has no file and line
    lines = text.splitlines() or [""]
    # torch.compile names the backend on the first line, and the error on the second
    words = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    if "Original Traceback" in text:  # the error comes from a loader worker
        words = f"in a worker of its loader: {lines[-1]}"
    if workload is not None and workload.folder:
        # shorten absolute paths on this machine to paths in the user's folder
        words = re.sub(rf"(?<![\w/])/\S*/{re.escape(workload.folder)}/", "", words)
    summary = f"{type(error).__name__}: {words}"[:500].removesuffix(": ")
    where = "" if workload is None else user_line(error, workload)
    return f"{summary} ({where})" if where else summary
