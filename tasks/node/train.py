"""The worker: one rank of a launch. Joins its peers, says that it is armed, waits for go, and serves the plan's items.

Items of one node go side by side: each node has its own processor share, and they use no network. An item of several
nodes runs alone: everybody waits for what came before it, and until it is over, at the launch's store, which costs no
processor time, for the key that an item's first rank sets. A workload that fails before any collective costs its own
record only; a rank that fails inside one ends the launch, and the controller tries again without that item.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from . import memory
from .built import Built, WorkloadError, build, try_once
from .machine import fingerprint
from .probe import probe
from .processes import die_with_parent
from .profiler import profile
from .record import Item, Plan, Record, plan_from_json, write_json
from .steps import train
from .strategies import strategy

PRECISIONS = ("fp32",)
_WAIT_S = 60.0
EXIT_ITEM_FAILED, EXIT_LOST_PEER, EXIT_MAILBOX = 3, 4, 5
_PEER_LOST = re.compile(r"gloo|connection|timed? ?out|socket|broken pipe", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What this rank knows: the plan, its own place, the store that all ranks share, and the groups made of them."""

    mailbox: Path
    node: int
    plan: Plan
    store: PrefixStore
    groups: dict[tuple[int, ...], dist.ProcessGroup]

    @property
    def own(self) -> Path:
        """This node's folder in the mailbox."""
        return self.mailbox / f"node-{self.node}"


def main() -> None:
    """Serve one attempt. Exits 0 when every item has a record, else with the reason as the log's last line."""
    parser = argparse.ArgumentParser(prog="node.train")
    parser.add_argument("--mailbox", type=Path, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    arguments = parser.parse_args()
    die_with_parent()
    plan = plan_from_json(arguments.plan.read_text())
    launch = join(arguments.mailbox, plan)
    report(launch, launch.own / f"armed-{plan.attempt}.json", {"armed_unix": time.time()})
    while not (launch.mailbox / f"go-{plan.attempt}.json").exists():
        time.sleep(0.05)
    beside: list[int] = []  # items of one node that nobody has waited for yet
    for index, item in enumerate(plan.items):
        together = len(item.nodes) > 1
        if together:
            wait_for_all(launch, beside)
        if launch.node in item.nodes:
            told = {"attempt": plan.attempt, "run_id": item.run_id, "index": index}
            report(launch, launch.own / "progress.json", told)
            serve(launch, index, item)
        if together:
            wait_for(launch, index)
        else:
            beside.append(index)
    wait_for_all(launch, beside)
    dist.destroy_process_group()


def join(mailbox: Path, plan: Plan) -> Launch:
    """Join the process group and every group that an item needs, and rehearse once: torch loads much on first use."""
    timeout = timedelta(seconds=plan.timeout_s)
    dist.init_process_group("gloo", timeout=timeout)
    node = dist.get_rank()
    # torchrun's own store outlives the workers of the other nodes; a second connection, so that waiting blocks nobody
    store = TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(hours=1)
    )
    wanted = {tuple(sorted(item.nodes)) for item in plan.items if len(item.nodes) > 1 or item.kind == "profile"}
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for nodes in sorted(wanted | {(one,) for one in range(len(plan.addresses))}):
        group = dist.new_group(list(nodes), timeout=timeout, backend="gloo")
        if node in nodes:
            groups[nodes] = group
    rehearse(groups[(node,)])
    dist.barrier()
    return Launch(
        mailbox=mailbox, node=node, plan=plan, store=PrefixStore(f"srift-{plan.attempt}", store), groups=groups
    )


def rehearse(alone: dist.ProcessGroup) -> None:
    """A tiny step through all the machinery: its first use costs a second of a whole core, which no measurement may."""
    model = torch.nn.Linear(2, 2)
    parallel = strategy("ddp")(model, alone)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        parallel.module(torch.zeros(1, 2)).sum().backward()
        optimizer.step()


def serve(launch: Launch, index: int, item: Item) -> None:
    """Measure `item` together with its other nodes; the first of them writes the record and tells those who wait."""
    memory.reset_peak()
    started_unix = time.time()
    built, problem = prepare(launch, item)
    try:
        problem = agree(launch, index, item, problem)
    except Exception as error:  # somebody died while building, or took longer than a collective may
        abort(launch, index, item, error, started_unix)
    build_s = time.time() - started_unix
    values: dict[str, Any] = {}
    if not problem:
        try:
            values, problem = measure(launch, item, built)
            if "build_s" in values:
                values["build_s"] += build_s
        except Exception as error:
            traceback.print_exc()
            if len(item.nodes) > 1:
                abort(launch, index, item, error, started_unix)
            problem = explain(error)
    if launch.node == min(item.nodes):
        write_record(launch, item, started_unix, values, problem)
        launch.store.set(f"item-{index}-done", "done")


def prepare(launch: Launch, item: Item) -> tuple[Built | None, str]:
    """All that can go wrong without the other ranks; the reason if it did."""
    try:
        if item.kind not in ("train", "profile", "probe"):
            raise ValueError(f"unknown kind of item {item.kind!r}; known: train, profile, probe")
        if item.kind == "probe":
            return None, ""
        if item.precision not in PRECISIONS:
            raise ValueError(f"unknown precision {item.precision!r}; known: {', '.join(PRECISIONS)}")
        strategy(item.strategy)
        if item.kind == "train" and len(item.batches) != len(item.nodes):
            raise ValueError(f"{len(item.batches)} batches for {len(item.nodes)} nodes")
        workload = next((one for one in launch.plan.workloads if one.name == item.workload), None)
        if workload is None:
            raise WorkloadError(f"the plan names no workload {item.workload!r}")
        built = build(launch.mailbox, workload, seed=item.seed, rank=launch.node)
        try_once(built, item.batches[item.nodes.index(launch.node)] if item.kind == "train" else min(item.batches))
        return built, ""
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return None, explain(error)


def agree(launch: Launch, index: int, item: Item, problem: str) -> str:
    """The reasons of all ranks of the item, empty if every one of them is ready.

    Raises RuntimeError if one of them is gone: a barrier notices that at once, a wait at the store would not.
    """
    launch.store.set(f"item-{index}-rank-{launch.node}-built", problem)
    if len(item.nodes) > 1:
        dist.barrier(group=launch.groups[tuple(sorted(item.nodes))])
    told = {node: launch.store.get(f"item-{index}-rank-{node}-built").decode() for node in sorted(item.nodes)}
    reasons = {reason: node for node, reason in reversed(told.items()) if reason}
    return "; ".join(f"node {node}: {reason}" for reason, node in sorted(reasons.items(), key=lambda one: one[1]))


def measure(launch: Launch, item: Item, built: Built | None) -> tuple[dict[str, Any], str]:
    """The item's values, and the reason where there are none."""
    nodes = tuple(sorted(item.nodes))
    group = launch.groups[nodes] if len(nodes) > 1 else None
    if built is None:
        return probe(item, group)
    if item.kind == "profile":
        return profile(item, built, launch.groups[nodes])
    return train(item, built, group, place=item.nodes.index(launch.node))


def abort(launch: Launch, index: int, item: Item, error: Exception, started_unix: float) -> NoReturn:
    """End the launch. A fault of the item's own is recorded; a lost peer is not, for the controller knows why."""
    code = EXIT_LOST_PEER
    try:
        if not lost_peer(error):
            code = EXIT_ITEM_FAILED
            launch.store.set(f"item-{index}-rank-{launch.node}-error", explain(error))
        if launch.node == min(item.nodes):
            reasons = collect_errors(launch, index, item)
            if reasons:
                code = EXIT_ITEM_FAILED
                write_record(launch, item, started_unix, {}, reasons)
            launch.store.set(f"item-{index}-done", "abort")
    except dist.DistError:
        code = EXIT_LOST_PEER  # the store went with node 0
    leave(code, f"srift: {item.run_id} ended on node {launch.node}: {explain(error)}")


def collect_errors(launch: Launch, index: int, item: Item) -> str:
    """What the ranks said went wrong, waiting a moment for those whose word is still under way."""
    keys = {node: f"item-{index}-rank-{node}-error" for node in item.nodes}
    until = time.monotonic() + 2.0
    while True:
        said = [node for node, key in keys.items() if launch.store.check([key])]
        if said or time.monotonic() > until:
            return "; ".join(f"node {node}: {launch.store.get(keys[node]).decode()}" for node in said)
        time.sleep(0.1)


def wait_for_all(launch: Launch, indices: list[int]) -> None:
    """Wait until every one of `indices` is over, and forget them."""
    while indices:
        wait_for(launch, indices.pop(0))


def wait_for(launch: Launch, index: int) -> None:
    """Wait until the item is over; leave if the launch is."""
    key = f"item-{index}-done"
    while True:
        asked = time.monotonic()
        try:
            launch.store.wait([key], timedelta(seconds=_WAIT_S))
            break
        except dist.DistError as error:
            if time.monotonic() - asked < _WAIT_S / 2:  # not the end of the wait, which a long item may well outlast
                leave(EXIT_LOST_PEER, f"srift: the launch's store is gone: {explain(error)}")
    if launch.store.get(key) == b"abort":
        leave(EXIT_LOST_PEER, f"srift: {launch.plan.items[index].run_id} failed on another node")


def write_record(launch: Launch, item: Item, started_unix: float, values: dict[str, Any], problem: str) -> None:
    """Put the item's record into the mailbox."""
    digests = {one.name: one.digest for one in launch.plan.workloads}
    record = Record(
        run_id=item.run_id,
        lease_id=launch.plan.lease_id,
        attempt=launch.plan.attempt,
        kind=item.kind,
        status="failed" if problem else "measured",
        reason=problem,
        item=asdict(item),
        workload_digest=digests.get(item.workload, ""),
        started_unix=started_unix,
        ended_unix=time.time(),
        fingerprint=fingerprint(),
        torch_version=version("torch"),
        values={} if problem else values,
    )
    report(launch, launch.own / "records" / f"{item.run_id}.json", asdict(record))


def report(launch: Launch, path: Path, body: dict[str, Any]) -> None:
    """Write into the mailbox, or end the launch saying why: measuring what cannot be told is waste."""
    try:
        write_json(path, body)
    except OSError as error:
        leave(
            EXIT_MAILBOX, f"srift: node {launch.node} could not write {path}: {error.strerror}; free some space there"
        )


def lost_peer(error: BaseException) -> bool:
    """Whether `error` is the loss of a connection rather than a fault of the workload."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and bool(_PEER_LOST.search(str(error)))
    )


def explain(error: BaseException) -> str:
    """One line: the kind of error and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}"[:500] if text else type(error).__name__


def leave(code: int, message: str) -> NoReturn:
    """End at once: closing sockets is what wakes the ranks that still wait for this one."""
    print(message, file=sys.stderr, flush=True)
    os._exit(code)


if __name__ == "__main__":
    main()
