"""The worker: one rank of a launch. Joins its peers, says that it is armed, waits for go, and
serves the plan's items.

A workload that fails before any collective costs its own record only; a rank that fails inside one
ends the launch, and the controller tries again without that item.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from .checkpoint import write_checkpoint
from .data import data_path
from .device import NoSuchDevice, reset_peak, usable
from .device_check import give_up
from .entrypoint import LoadedWorkload, WorkloadError, build, try_once
from .launch import Launch, explain, in_order, join, leave, report, wait_for, wait_for_all
from .loader import worker_deaths_ignored
from .precision import arithmetic
from .probe import probe
from .processes import EXIT_ITEM_FAILED, EXIT_LOST_PEER, die_with_parent
from .profiler import profile
from .record import LEARN, TRAINING, Item, RankLayout, plan_from_json, record_of
from .steps import learn, train
from .strategies import DDP, refuse_model, refuse_training, shares_out, strategy
from .switches import compiled_nothing, switch_on

_PEER_LOST = re.compile(r"gloo|nccl|connection|timed? ?out|socket|broken pipe", re.IGNORECASE)


def main() -> None:
    """Serve one attempt. Exits 0 when every item has a record, else with the reason as the log's
    last line.
    """
    parser = argparse.ArgumentParser(prog="node.worker")
    parser.add_argument("--mailbox", type=Path, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    arguments = parser.parse_args()
    die_with_parent()
    plan = plan_from_json(arguments.plan.read_text())
    try:
        launch = join(arguments.mailbox, plan)
    except (
        NoSuchDevice
    ) as error:  # lost since `device_check` looked: every run that needs this node tells of it
        node, _ = RankLayout.of(plan).places[int(os.environ["RANK"])]
        leave(*give_up(arguments.mailbox, plan, node, str(error)))
    if launch.reports:
        links = {"pairs": launch.pairs} if launch.rank == 0 else {}
        report(launch, f"armed-{plan.attempt}.json", {"armed_unix": time.time()} | links)
    go = launch.mailbox / f"go-{plan.attempt}.json"
    while not go.exists():
        time.sleep(0.05)
    try:
        launch = in_order(launch, json.loads(go.read_text()))
    except RuntimeError as error:
        leave(EXIT_LOST_PEER, f"ranks could not be put in order: {explain(error)}")
    beside: list[int] = []  # items of one node that nobody has waited for yet
    for index, item in enumerate(plan.items):
        together = len(item.nodes) > 1
        if together:
            wait_for_all(launch, beside)
        if launch.serves(item):
            if launch.reports:
                report(
                    launch,
                    "progress.json",
                    {"attempt": plan.attempt, "run_id": item.run_id, "index": index},
                )
            serve(launch, index, item)
        if together or (launch.node in item.nodes and not launch.leads(item)):
            wait_for(launch, index)
        else:
            beside.append(index)
    wait_for_all(launch, beside)
    dist.destroy_process_group()


def serve(launch: Launch, index: int, item: Item) -> None:
    """Measure `item` with its other nodes; the first of them, or one that fails, writes
    the record.
    """
    reset_peak(launch.device)
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
            with worker_deaths_ignored():
                traceback.print_exc()
                if launch.group(item) is not None:
                    abort(launch, index, item, error, started_unix)
                problem = explain(error, launch.workload(item))
    if built is not None:
        built.close()
    if launch.leads(item):
        write_record(launch, item, started_unix, problem, values)
        launch.store.set(f"item-{index}-done", "done")
    if problem and not usable(launch.device):
        leave(
            EXIT_ITEM_FAILED,
            f"{item.run_id} left {launch.layout.label(launch.rank)} unusable: {problem}",
        )


def prepare(launch: Launch, item: Item) -> tuple[LoadedWorkload | None, str]:
    """Build and try the workload without the other ranks; return it, or the reason if that
    failed.
    """
    try:
        if item.kind == "probe":
            return None, ""
        strategy(item.strategy, item.switches, launch.device, machines=item.used)
        refuse_training(item.strategy, item.precision, item.batches)
        workload = launch.workload(item)
        if workload is None:
            raise WorkloadError(f"the plan names no workload {item.workload!r}")
        workload = replace(
            workload, data=data_path(launch.mailbox, workload) if workload.data else ""
        )
        shared = item.kind in TRAINING and shares_out(item.strategy)
        built = build(
            launch.code_of(workload),
            workload,
            seed=item.seed,
            rank=launch.rank,
            computing=arithmetic(item.precision, launch.device),
            shared=shared,
        )
        try:
            refuse_model(item.strategy, built.model, item.used)
            switch_on(built.model, item.switches, whole=not shares_out(item.strategy))
            batch = (
                item.batches[item.nodes.index(launch.node)]
                if item.kind in TRAINING
                else min(item.batches)
            )
            try_once(built, batch, shared=shared)
        except BaseException:
            built.close()
            raise
        return built, ""
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        return None, explain(error, launch.workload(item))


def agree(launch: Launch, index: int, item: Item, problem: str) -> str:
    """Return the reasons of all ranks of the item; empty if every rank is ready.

    Raises RuntimeError if a rank is gone: a barrier notices that at once.
    """
    launch.store.set(f"item-{index}-rank-{launch.rank}-built", problem)
    group = launch.group(item)
    if group is not None:
        dist.barrier(group=group)
    answers = {
        rank: launch.store.get(f"item-{index}-rank-{rank}-built").decode()
        for rank in launch.layout.ranks(item)
    }
    reasons = {reason: rank for rank, reason in reversed(answers.items()) if reason}
    by_rank = sorted(reasons.items(), key=lambda one: one[1])
    return "; ".join(f"{launch.layout.label(rank)}: {reason}" for reason, rank in by_rank)


def measure(launch: Launch, item: Item, built: LoadedWorkload | None) -> tuple[dict[str, Any], str]:
    """Return the item's values, or the reason if there are none."""
    group, patience, given = launch.group(item), launch.patience, item
    item = launch.layout.placed(item)
    patience.reset()
    if built is None:
        values, problem = probe(item, group, launch.device, patience)
    elif item.kind == "profile":
        values, problem = profile(item, built, launch.alone, patience)
    elif item.kind == LEARN:
        values, problem = learn(item, built, group, place=item.nodes.index(launch.node))
    else:
        values, problem = train(item, built, group, patience, place=item.nodes.index(launch.node))
        if (
            values
            and launch.rank == 0
            and item.strategy == DDP
            and item.workload not in launch.written
        ):
            launch.written.add(item.workload)
            values |= write_checkpoint(built)
    if not problem and compiled_nothing(item.switches):
        return (
            {},
            "compile: torch's compiler found nothing in this model to compile",
        )
    values |= {"taken_share": patience.taken_share} | patience.reference_values(item.used)
    return launch.by_node(given, values), problem


def abort(
    launch: Launch, index: int, item: Item, error: Exception, started_unix: float
) -> NoReturn:
    """End the launch, with a record for a fault of the item. The controller explains a lost peer.

    Without the launch's store, the fault may be the store's.
    """
    explained = explain(error, launch.workload(item))
    code, reason = EXIT_LOST_PEER, f"{launch.layout.label(launch.rank)}: {explained}"
    try:
        if not lost_peer(error):
            code = EXIT_ITEM_FAILED
            launch.store.set(f"item-{index}-rank-{launch.rank}-error", explained)
            if not launch.leads(item) and not (launch.folder / _record(item)).exists():
                # torchrun may end the item's first rank, where it is a neighbour, before that has
                # heard of it
                write_record(launch, item, started_unix, reason)
        if launch.leads(item):
            reasons = collect_errors(launch, index, item)
            if reasons:
                code, reason = EXIT_ITEM_FAILED, reasons
                write_record(launch, item, started_unix, reasons)
            launch.store.set(f"item-{index}-done", "abort")
    except dist.DistError:
        code = EXIT_LOST_PEER  # the store went with node 0
    leave(code, f"{item.run_id} ended on {reason}")


def collect_errors(launch: Launch, index: int, item: Item) -> str:
    """Return the errors of all ranks, after a short wait for late ones."""
    keys = {rank: f"item-{index}-rank-{rank}-error" for rank in launch.layout.ranks(item)}
    until = time.monotonic() + 2.0
    while True:
        answers = [rank for rank, key in keys.items() if launch.store.check([key])]
        if answers or time.monotonic() > until:
            return "; ".join(
                f"{launch.layout.label(rank)}: {launch.store.get(keys[rank]).decode()}"
                for rank in answers
            )
        time.sleep(0.1)


def write_record(
    launch: Launch,
    item: Item,
    started_unix: float,
    problem: str,
    values: dict[str, Any] | None = None,
) -> None:
    devices = launch.used(item)
    record = record_of(
        launch.plan,
        item,
        started_unix=started_unix,
        problem=problem,
        values=values,
        devices=devices,
    )
    report(launch, _record(item), record)


def _record(item: Item) -> str:
    return f"records/{item.run_id}.json"


def lost_peer(error: BaseException) -> bool:
    """True if `error` is the loss of a connection, not a fault of the workload."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and bool(_PEER_LOST.search(str(error)))
    )


if __name__ == "__main__":
    main()
