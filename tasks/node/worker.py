"""Run one torchrun rank: join the process group, wait for the controller, measure the plan's runs.

The controller is the process that launched the machines. Each item of its plan is one measurement
run. If a workload fails before its first collective, the other runs continue. If a rank fails
during a collective, torchrun ends. The controller then starts torchrun again without the failed
run.
"""

import re
import time
import traceback
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist

from .checkpoint import write_checkpoint
from .device import reset_peak, usable
from .entrypoint import LoadedWorkload, try_once
from .equivalence import compare
from .launch import Launch, explain
from .loader import worker_deaths_ignored
from .probe import probe
from .processes import EXIT_ITEM_FAILED, EXIT_LOST_PEER, die_with_parent, leave
from .profiler import profile
from .record import LEARN, Item
from .repetition import NotMeasured
from .steps import learn, train
from .strategies.refusals import DDP, EQUAL_TO_DDP, SHARDED, refuse, refuse_model
from .strategies.replicas import of_ranks
from .switches import compiled_nothing, switch_on

_PEER_LOST = re.compile(
    r"^(?!.*DataLoader).*(gloo|nccl|connection|timed? ?out|socket|broken pipe)", re.I | re.S
)


def main() -> None:
    """Measure the runs of the plan that use this rank. Wait until the other runs have ended too.

    An exit code of 0 means that every run of the plan has a record.
    """
    die_with_parent()
    launch = Launch()
    go = launch.wait_for_go({"pairs": launch.pairs})
    try:
        launch.take_order(go)
    except RuntimeError as error:
        leave(EXIT_LOST_PEER, f"the ranks could not be reordered: {explain(error)}")
    items = launch.plan.items
    for index, item in enumerate(items):
        together = len(item.nodes) > 1
        if together:
            launch.wait_for(items[:index])
        if launch.rank in launch.plan.ranks_of(item):
            serve(launch, item)
        if together or launch.node in item.nodes:
            launch.wait_for([item])
    launch.wait_for(items)
    dist.destroy_process_group()


def serve(launch: Launch, item: Item) -> None:
    """Measure the run `item` together with the run's other ranks.

    The run's first rank writes the record. If `prepare` reports a problem, or NotMeasured is
    raised, all ranks of the run know the error, and the process continues. In a run with several
    ranks, any other error ends the process (see `abort`).
    """
    reset_peak(launch.device)
    launch.begin(item)
    group = launch.group(item)
    built, problem = prepare(launch, item)
    values: dict[str, Any] = {}
    try:
        # all ranks skip the run if any rank has a problem; an error here means that a rank is lost
        problem = next(filter(None, of_ranks(problem, group)), "")
        build_s = time.time() - launch.started_unix
        if not problem:
            values = measure(launch, item, built)
            if "build_s" in values:
                values["build_s"] += build_s
    except NotMeasured as error:
        problem = str(error)
    except Exception as error:
        with worker_deaths_ignored():
            traceback.print_exc()
            if group is not None:
                abort(launch, item, error)
            problem = explain(error, launch.plan.workload(item))
    if built is not None:
        built.close()
    if launch.leads(item):
        launch.write_record(item, problem, values)
        launch.store.set(item.run_id, "done")
    if problem and not usable(launch.device):
        leave(EXIT_ITEM_FAILED, f"{item.run_id} left {launch.label} unusable: {problem}")


def prepare(launch: Launch, item: Item) -> tuple[LoadedWorkload | None, str]:
    """Build the workload, and try one forward and backward pass on this rank alone.

    Returns (workload, problem). `problem` is an error message, or "". `workload` is None if no
    workload was built, for example because the run is a probe of the network.
    """
    built, problem = None, ""
    if item.kind == "probe":
        return built, problem
    try:
        refuse(item, launch.device)
        built = launch.load(item, shared=item.strategy in SHARDED)
        refuse_model(item.strategy, built.model, item.used)
        switch_on(built.model, item.switches, whole=not built.shared)
        try_once(built, item.batches[item.nodes.index(launch.node)])
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        problem = f"{launch.label}: {explain(error, launch.plan.workload(item))}"
    return built, problem


def measure(launch: Launch, item: Item, built: LoadedWorkload | None) -> dict[str, Any]:
    """Measure the run `item`, and return the values for its record.

    `built` is the workload, or None for a probe of the network.

    Raises:
        NotMeasured: the run has no valid measurement, or the strategy should train exactly like ddp
            but does not.
        Exception: any error of the workload.
    """
    group, patience = launch.group(item), launch.patience
    placed = launch.in_ring_order(item)
    patience.reset()
    if built is None:
        values = probe(placed, group, launch.device, patience)
    elif item.kind == "profile":
        values = profile(item, built, launch.groups[(launch.rank,)], patience)
    elif item.kind == LEARN:
        values = learn(placed, built, group)
    else:
        # compare once for each workload, strategy, precision and set of ranks
        key = f"{item.workload} {item.strategy} {item.precision} {launch.plan.ranks_of(item)}"
        if group is not None and item.strategy in EQUAL_TO_DDP and key not in launch.compared:
            launch.compared[key] = compare(placed, partial(launch.load, item), group)
            reset_peak(launch.device)
        values = train(placed, built, group, patience)
        values["not_compared"] = launch.compared.get(key, "")
        is_first = launch.rank == 0 and item.workload not in launch.written
        if is_first and item.strategy == DDP:
            launch.written.add(item.workload)
            values |= write_checkpoint(built)
    if compiled_nothing(item.switches):
        raise NotMeasured(
            "switch compile: torch.compile found nothing to compile in this model; train without"
            " this switch"
        )
    if compute_s := values.get("rank_compute_s"):
        values["rank_compute_s"] = launch.by_rank(item, compute_s)
    patience.references = [launch.by_rank(item, block) for block in patience.references]
    values |= {"taken_share": patience.taken_share} | patience.reference_values(item.used)
    return values if placed is item else values | {"rank_order": placed.nodes}


def abort(launch: Launch, item: Item, error: Exception) -> NoReturn:
    """End this process because of `error`, so that torchrun ends the other ranks.

    The run is first recorded as failed, unless `error` means that the connection to another rank is
    lost. In that case, the other rank caused the failure.
    """
    reason = f"{launch.label}: {explain(error, launch.plan.workload(item))}"
    code = EXIT_LOST_PEER
    with suppress(dist.DistError):  # raised if the store's machine is lost: exit without a record
        launch.store.check([item.run_id])
        # every failed rank writes the record, because torchrun may end the first rank too early
        if not lost_peer(error):
            code = EXIT_ITEM_FAILED
            launch.write_record(item, reason)
        if launch.leads(item):
            launch.store.set(item.run_id, "abort")
    leave(code, f"{item.run_id} failed on {reason}")


def lost_peer(error: BaseException) -> bool:
    """Return True if `error` means that the connection to another rank is lost."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and bool(_PEER_LOST.search(str(error)))
    )


if __name__ == "__main__":
    main()
