"""The worker of an elastic run: trains with the machines that are there, and resumes from the
newest checkpoint when they change.

torchrun ends and starts it whenever a node is lost or joins. Its global batch stays the same: the
ranks that are there share it out as the item's batches say, in as many micro-steps as keep each
device within its own. The first rank of the item's first node writes checkpoints, notes what
happened, and in the end the run's record.

    loss of a step = sum over ranks and micro-steps of n / B x (mean loss of n samples)
"""

from __future__ import annotations

import math
import os
import struct
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .checkpoint import Checkpoints
from .device import NoSuchDevice, backend, name_of, now, own_device
from .entrypoint import LoadedWorkload, try_once
from .launch import explain, load, report
from .loader import running
from .measuring import gather
from .processes import (
    EXIT_ITEM_FAILED,
    EXIT_LOST_PEER,
    EXIT_NO_DEVICE,
    die_with_parent,
    leave,
    seconds_since_start,
)
from .record import Devices, Item, Plan, RankLayout, record_of, task_of_process
from .steps import one_step
from .strategies import strategy
from .strategies.refusals import DDP
from .switches import NONE
from .worker import lost_peer, wait_for_go

_MARK = struct.Struct("<qd")  # the last step that was done, and when
_LATE_S = 5.0  # at least, that one worker may come to a meeting after another


def shares(global_batch: int, batches: Sequence[int]) -> list[list[int]]:
    """Share `global_batch` in proportion to `batches`, the most samples that each rank takes at
    once; return each rank's micro-batches.

    The largest comes last, which communicates; some may be 0. Samples left over go one by one to
    the rank that is furthest behind its share: equal ranks differ by at most one sample. Raises
    ValueError for a batch smaller than the number of ranks.
    """
    if global_batch < len(batches) or min(batches) < 1:
        raise ValueError(
            f"a batch of {global_batch} cannot be shared by {len(batches)} ranks of {list(batches)}"
        )
    exact = [global_batch * batch / sum(batches) for batch in batches]
    samples = [max(1, math.floor(count)) for count in exact]
    behind = lambda rank: exact[rank] - samples[rank]  # noqa: E731
    while sum(samples) < global_batch:
        samples[max(range(len(samples)), key=behind)] += 1
    while sum(samples) > global_batch:  # some had to be raised to one sample
        samples[min((rank for rank, count in enumerate(samples) if count > 1), key=behind)] -= 1
    steps = max(-(-count // most) for count, most in zip(samples, batches, strict=True))
    return [[(count + step) // steps for step in range(steps)] for count in samples]


class ElasticRun:
    """One rank's part in the run, from this start of its worker.

    The leading rank, the first one of the node at which all meet, keeps the last step that was
    done in `mark_path`, on its node's disk.
    """

    def __init__(self, mailbox: Path, plan: Plan, item: Item, node: int) -> None:
        self.mailbox, self.plan, self.item, self.node = mailbox, plan, item, node
        self.started_unix = time.time()
        self.node_folder = mailbox / f"node-{node}"
        self.mark_path = self.node_folder / f"elastic-{item.run_id}"
        self.device = own_device(plan.expected[node])
        self.host = RankLayout.of(plan).host
        self.is_first_of_node = os.environ["LOCAL_RANK"] == "0"
        self.leads = node == self.host and self.is_first_of_node
        self.checkpoints = Checkpoints(Path(plan.checkpoints))
        self.nodes: list[int] = []  # of each rank, once they met

    def built(self) -> LoadedWorkload:
        """Build the workload; before the first checkpoint, try one pass. Raises what is wrong with
        it.
        """
        item = self.item
        if item.strategy != DDP or item.switches != NONE:
            raise ValueError(
                f"an elastic run trains in {DDP} without switches: each rank must hold the whole"
                " state"
            )
        place = (self.node, int(os.environ["RANK"]))
        found = load(self.mailbox, self.plan, item, place=place, device=self.device)
        if not self.checkpoints.starts():
            try_once(found, item.batches[item.nodes.index(self.node)])
        return found

    def join(self) -> None:
        """Join the process group of this start. Raises DistError if a rank does not come."""
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        patience = timedelta(seconds=self.patience_s())
        timeout = timedelta(seconds=self.plan.timeout_s)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, ranks, rank == 0, patience, multi_tenant=True
        )
        store.set_timeout(timeout)
        dist.init_process_group(
            backend(self.device), timeout=timeout, store=store, rank=rank, world_size=ranks
        )
        self.nodes = [int(node) for (node,) in gather([self.node], dist.group.WORLD)]

    def patience_s(self) -> float:
        """Return seconds to wait for the other ranks to join.

        torchrun does not tell a worker that a machine was lost meanwhile. After a restart all ranks
        start at once, so the wait is this worker's own start-up time, doubled after each failed
        rendezvous.
        """
        starts = len(self.checkpoints.starts())
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if not starts:
            return self.plan.timeout_s
        failed = max(0, restarts - starts)
        return min(self.plan.timeout_s, (_LATE_S + seconds_since_start()) * 2.0**failed)

    def restore(self, built: LoadedWorkload, rank: int) -> dict[str, Any]:
        """Restore model and optimizer from the newest checkpoint.

        Returns `step`, from which to go on, `restore_s` and `restore_bytes`. Random numbers go on
        from a seed of rank and step. Raises RuntimeError if ranks found different steps.
        """
        began = now(self.device)
        found = self.checkpoints.newest(self.device)
        taken: dict[str, Any] = {"step": 0, "restore_s": None, "restore_bytes": None}
        if found is not None:
            manifest, state = found
            step = int(manifest["step"])
            built.model.load_state_dict(state["model"])
            built.optimizer.load_state_dict(state["optimizer"])
            built.arithmetic.scaler.load_state_dict(state["scaler"])
            torch.manual_seed(self.item.seed + 1000 * (rank + 1) + step)
            seconds = now(self.device) - began
            taken = {"step": step, "restore_s": seconds, "restore_bytes": int(manifest["bytes"])}
        steps = sorted({int(step) for (step,) in gather([taken["step"]], dist.group.WORLD)})
        if len(steps) > 1:
            raise RuntimeError(
                f"ranks found checkpoints of steps {steps}: they see different folders"
            )
        return taken

    def train(self, built: LoadedWorkload) -> dict[str, Any]:
        """Train to the last step; return the record's values at the leading rank. Raises
        FloatingPointError.
        """
        item, nodes, rank = self.item, self.nodes, dist.get_rank()
        samples = sum(used * batch for used, batch in zip(item.used, item.batches, strict=True))
        global_batch = item.accumulation_steps * samples
        by_rank = shares(global_batch, [item.batches[item.nodes.index(node)] for node in nodes])
        start = self.restore(built, rank)
        module = built.model
        if len(nodes) > 1:
            assert dist.group.WORLD is not None
            module = strategy(DDP)(built.model, built.optimizer, dist.group.WORLD)
        start["restored_unix"] = time.time()
        self.wait_for_go()
        step = at = int(start["step"])
        mark = -1
        if self.leads:
            mark = os.open(self.mark_path, os.O_RDWR | os.O_CREAT)
            content = os.read(mark, _MARK.size)
            last_step, last_unix = _MARK.unpack(content) if content else (0, None)
            self.checkpoints.note_start(
                start
                | {
                    "nodes": nodes,
                    "batches": [sum(sizes) for sizes in by_rank],
                    "micro_steps": len(by_rank[0]),
                    "lost_steps": max(0, last_step - step),
                    "last_unix": last_unix,
                    "began_unix": time.time(),
                }
            )
        sizes = by_rank[rank]
        with running(built.loader):
            began = now(self.device)
            while step < item.most_steps:
                loss = one_step(built, module, sizes, scale=len(nodes) / global_batch)
                step += 1
                if self.leads:
                    os.pwrite(mark, _MARK.pack(step, time.time()), 0)
                if step % item.checkpoint_every == 0 or step == item.most_steps:
                    about = {"steps": step - at, "steps_s": now(self.device) - began}
                    self.checkpoint(built, step, loss * sum(sizes) / global_batch, about)
                    at, began = step, now(self.device)
        return self.values(built) if self.leads else {}

    def checkpoint(
        self, built: LoadedWorkload, step: int, partial_loss: float, about: dict[str, Any]
    ) -> None:
        """Write the state after `step`. Raises FloatingPointError if the loss is no number."""
        loss = sum(mine for (mine,) in gather([partial_loss], dist.group.WORLD))
        if not self.leads:
            return
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} after {step} steps: not a number to train with"
            )
        state = {
            "step": step,
            "model": built.model.state_dict(),
            "optimizer": built.optimizer.state_dict(),
            "scaler": built.arithmetic.scaler.state_dict(),
        }
        self.checkpoints.write(step, state, loss=loss, **about)

    def values(self, built: LoadedWorkload) -> dict[str, Any]:
        """Return the record's values."""
        written = self.checkpoints.manifests()
        columns = ("step", "bytes", "seconds", "ended_unix", "steps", "steps_s")
        return {
            "steps": self.item.most_steps,
            "first_loss": written[0]["loss"],
            "last_loss": written[-1]["loss"],
            "parameters": built.parameters,
            "gradient_bytes": built.gradient_bytes,
            "starts": self.checkpoints.starts(),
            "checkpoints": [{name: manifest[name] for name in columns} for manifest in written],
        }

    def wait_for_go(self) -> None:
        """Report that this node is ready, and wait for the controller; after a restart at once."""
        attempt = self.plan.attempt
        if self.is_first_of_node:
            self.put(f"armed-{attempt}.json", {"armed_unix": time.time()})
        wait_for_go(self.mailbox, attempt)
        if self.is_first_of_node:
            progress = {"attempt": attempt, "run_id": self.item.run_id, "index": 0}
            self.put("progress.json", progress)

    def record(self, problem: str, values: dict[str, Any] | None = None) -> None:
        """Write the run's record; of a failure, by the rank that failed."""
        name, threads = name_of(self.device), torch.get_num_threads()
        used = [Devices(name=name, count=count, threads=threads) for count in self.item.used]
        record = record_of(
            self.plan,
            self.item,
            started_unix=values["starts"][0]["began_unix"] if values else self.started_unix,
            problem=problem,
            values=values,
            devices=used,
        )
        self.put(f"records/{self.item.run_id}.json", record)

    def put(self, name: str, body: Any) -> None:
        """Write into the node's folder, or end with the reason."""
        report(self.mailbox, self.node, name, body)


def main() -> None:
    """Serve one start. Exits 0 once the steps are done, else with the reason as the log's last
    line.
    """
    die_with_parent()
    mailbox, plan, node = task_of_process()
    assert plan.elastic is not None
    try:
        run = ElasticRun(mailbox, plan, plan.elastic, node)
    except NoSuchDevice as error:
        leave(EXIT_NO_DEVICE, str(error))
    try:
        built = run.built()
        run.join()
        values = run.train(built)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        reason = f"node {node}: {explain(error, plan.workload(run.item))}"
        if lost_peer(error):  # torchrun starts this again, with those that are left
            leave(EXIT_LOST_PEER, f"a peer of {reason}")
        run.record(reason)
        leave(EXIT_ITEM_FAILED, f"{run.item.run_id} ended on {reason}")
    if run.leads:
        run.record("", values)
    built.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
