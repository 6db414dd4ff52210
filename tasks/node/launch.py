"""One rank's part in a launch: joining its peers, the groups made of them, waiting for others,
telling, ending.

Items of one node go side by side: each node has its own processor share, and they use no network.
An item of several nodes runs alone: everybody waits for what came before it, and until it is over,
at the launch's store, which costs no processor time, for the key that an item's first rank sets. A
node's devices serve its items one after the other: those that an item leaves idle wait for it too.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from .device import backend, name_of, own_device
from .entrypoint import own_line
from .loader import in_words
from .measuring import Patience
from .probe import pairs
from .processes import EXIT_LOST_PEER, EXIT_MAILBOX, exit_line
from .record import LEAST_ORDERED, Devices, Item, Plan, RankLayout, WorkloadFile, write_json
from .reference import Reference
from .strategies import DDP, strategy

_WAIT_S = 60.0
_LISTS = {
    "rank_step_s",
    "rank_compute_s",
    "reference_s",
}  # of values, with an entry a rank or a node
_ORDERS = (
    "sort_ranks" in signature(dist.new_group).parameters
)  # torch 2.13 can make groups in any order of ranks
_PAIRS = " pairs"  # no workload's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What this rank knows: the plan, its own place, the store that all ranks share, and the groups
    made of them.

    `devices`: of each rank, what its device is called, and the threads that it computes with.
    `pairs`: what was measured between machines, at their first ranks; `order_reason`: why ranks
    send to each other in the order they do.
    """

    mailbox: Path
    plan: Plan
    layout: RankLayout
    rank: int
    device: torch.device
    store: PrefixStore
    groups: dict[tuple[int, ...], dist.ProcessGroup]
    patience: Patience
    devices: tuple[tuple[str, int], ...]
    written: set[str] = field(
        default_factory=set
    )  # workloads of which this rank wrote a checkpoint
    pairs: dict[str, Any] = field(default_factory=dict)
    order_reason: str = ""

    @property
    def node(self) -> int:
        """The index of this rank's machine in the cluster."""
        return self.layout.places[self.rank][0]

    @property
    def reports(self) -> bool:
        """True for the first rank of a node, which serves every item of it and reports for it."""
        return self.layout.places[self.rank][1] == 0

    @property
    def folder(self) -> Path:
        return self.mailbox / f"node-{self.node}"

    def code_of(self, workload: WorkloadFile) -> Path:
        """The folder that holds its code: archives are unpacked on each node."""
        return self.folder / "scratch" if workload.folder else self.mailbox

    def serves(self, item: Item) -> bool:
        return self.rank in self.layout.ranks(item)

    def leads(self, item: Item) -> bool:
        """True for the first rank of `item`, which writes its record."""
        return self.rank == self.layout.ranks(item)[0]

    def workload(self, item: Item) -> WorkloadFile | None:
        """The item's workload; None for a probe."""
        return next((one for one in self.plan.workloads if one.name == item.workload), None)

    def group(self, item: Item) -> dist.ProcessGroup | None:
        """The item's process group; None if it has one rank."""
        ranks = self.layout.ranks(item)
        return self.groups[ranks] if len(ranks) > 1 else None

    def by_node(self, item: Item, values: Mapping[str, Any]) -> dict[str, Any]:
        """Reorder the lists of `values` from the sending order to the item's nodes, and add that
        order.
        """
        if not self.order_reason or len(item.nodes) < LEAST_ORDERED:
            return dict(values)
        nodes, ranks = self.layout.placed(item).nodes, self.layout.sending_ranks(item)
        comes: dict[int, list[int]] = {len(nodes): [nodes.index(one) for one in item.nodes]}
        comes[len(ranks)] = [ranks.index(one) for one in self.layout.ranks(item)]
        found = dict(values)
        for name in _LISTS & values.keys():
            found[name] = (
                [values[name][place] for place in comes[len(values[name])]] if values[name] else []
            )
        found |= {"rank_order": nodes, "rank_order_reason": self.order_reason}
        if self.pairs:
            found["pairs_s"] = self.pairs["took_s"]
            if _PAIRS not in self.written:
                self.written.add(_PAIRS)
                found["pairs"] = self.pairs
        return found

    def used(self, item: Item) -> list[Devices]:
        """The devices of `item`, one entry a node."""
        found = []
        for node in item.nodes:
            served = (
                rank for rank in self.layout.ranks(item) if self.layout.places[rank][0] == node
            )
            names, threads = zip(*(self.devices[rank] for rank in served), strict=True)
            found.append(
                Devices(name="+".join(dict.fromkeys(names)), count=len(names), threads=max(threads))
            )
        return found

    @property
    def alone(self) -> dist.ProcessGroup:
        """The process group of this rank alone."""
        return self.groups[(self.rank,)]


def join(mailbox: Path, plan: Plan) -> Launch:
    """Join the process group and every item's group, and rehearse once: first use loads much of
    torch.

    Raises NoSuchDevice if the machine lacks the devices that the plan expects.
    """
    layout = RankLayout.of(plan)
    node, _ = layout.places[int(os.environ["RANK"])]
    device = own_device(plan.expected[node])
    dist.init_process_group(backend(device), timeout=timedelta(seconds=plan.join_s))
    rank = dist.get_rank()
    # torchrun's own store outlives the workers of the other nodes; a second connection, so that
    # waiting blocks nobody
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(hours=1),
    )
    everybody = range(len(layout.places))
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in sorted(
        {layout.ranks(item) for item in plan.items} | {(one,) for one in everybody}
    ):
        group = dist.new_group(
            list(ranks), timeout=timedelta(seconds=plan.timeout_s), backend=backend(device)
        )
        if rank in ranks:
            groups[ranks] = group
    rehearse(groups[(rank,)], device)
    found = _pairs(layout, rank, timedelta(seconds=plan.join_s)) if plan.pairs and _ORDERS else {}
    shared = PrefixStore(f"srift-{plan.attempt}", store)
    shared.set(f"device-{rank}", json.dumps([name_of(device), torch.get_num_threads()]))
    dist.barrier()
    gathered = shared.multi_get([f"device-{one}" for one in everybody])
    return Launch(
        mailbox=mailbox,
        plan=plan,
        layout=layout,
        rank=rank,
        device=device,
        store=shared,
        groups=groups,
        patience=Patience(left_s=plan.patience_s, reference=Reference.on(device)),
        devices=tuple((str(name), int(threads)) for name, threads in map(json.loads, gathered)),
        pairs=found,
    )


def in_order(launch: Launch, go: Mapping[str, Any]) -> Launch:
    """Return `launch` with groups remade in the sending order of `go`. Every rank must call it."""
    sending, reason = tuple(go.get("order") or ()), str(go.get("why") or "")
    if not sending:
        return replace(launch, order_reason=reason)
    layout, groups = replace(launch.layout, sending=sending), dict(launch.groups)
    ordered = {layout.ranks(item): layout.sending_ranks(item) for item in launch.plan.items}
    timeout = timedelta(seconds=launch.plan.timeout_s)
    for ranks, sends in sorted(ordered.items()):
        if sends != ranks:
            group = dist.new_group(
                list(sends), timeout=timeout, backend=backend(launch.device), sort_ranks=False
            )
            groups |= {ranks: group} if launch.rank in ranks else {}
    return replace(launch, layout=layout, groups=groups, order_reason=reason)


def _pairs(layout: RankLayout, rank: int, timeout: timedelta) -> dict[str, Any]:
    """Measure links between the nodes at their first ranks; empty at other ranks."""
    firsts = [one for one, (_, device) in enumerate(layout.places) if device == 0]
    group = dist.new_group(firsts, timeout=timeout, backend="gloo")
    return pairs(group) | {"nodes": list(layout.devices)} if rank in firsts else {}


def rehearse(alone: dist.ProcessGroup, device: torch.device) -> None:
    """Run a tiny step: its first use costs a second of a core, which no measurement may."""
    model = torch.nn.Linear(2, 2, device=device)
    optimizer = torch.optim.Adam(model.parameters())
    parallel = strategy(DDP)(model, optimizer, alone, device)
    for _ in range(2):
        parallel(torch.zeros(1, 2, device=device)).sum().backward()
        optimizer.step()


def wait_for_all(launch: Launch, indices: list[int]) -> None:
    """Wait until all of `indices` are over, and clear the list."""
    while indices:
        wait_for(launch, indices.pop(0))


def wait_for(launch: Launch, index: int) -> None:
    """Wait until the item is over; exit if the launch is."""
    key = f"item-{index}-done"
    while True:
        waiting_since = time.monotonic()
        try:
            launch.store.wait([key], timedelta(seconds=_WAIT_S))
            break
        except dist.DistError as error:
            if (
                time.monotonic() - waiting_since < _WAIT_S / 2
            ):  # not the end of the wait, which a long item may well outlast
                leave(EXIT_LOST_PEER, f"the launch's store is gone: {explain(error)}")
    if launch.store.get(key) == b"abort":
        leave(EXIT_LOST_PEER, f"{launch.plan.items[index].run_id} failed on another node")


def report(launch: Launch, name: str, body: Any) -> None:
    """Write into the node's folder, or end the launch: what cannot be reported need not be
    measured.
    """
    path = launch.folder / name
    try:
        write_json(path, body)
    except OSError as error:
        leave(
            EXIT_MAILBOX,
            f"node {launch.node} could not write {path}: {error.strerror}; free some space there",
        )


def explain(error: BaseException, workload: WorkloadFile | None = None) -> str:
    """Return one line: the kind of error, its first line, and the line of `workload` where it
    arose.
    """
    error = in_words(error)
    text = str(error.msg if isinstance(error, SyntaxError) else error).strip().splitlines()
    if (
        text and workload is not None and workload.folder
    ):  # a file of the folder by the name that its user knows
        text[0] = re.sub(rf"(?<![\w/])/\S*/{re.escape(workload.folder)}/", "", text[0])
    # torch.compile names the backend on the first line, and what went wrong on the second
    words = " ".join(text[: 2 if text and text[0].endswith(":") else 1])
    summary = f"{type(error).__name__}: {words}"[:500] if text else type(error).__name__
    where = "" if workload is None else own_line(error, workload)
    return f"{summary} ({where})" if where else summary


def leave(code: int, message: str) -> NoReturn:
    """Exit at once: closed sockets wake the ranks that still wait for this one."""
    print(exit_line(code, message), file=sys.stderr, flush=True)
    os._exit(code)
