"""Run one rank of an elastic run, which resumes from a checkpoint when machines change.

torchrun restarts the workers whenever a node is lost or joins. The global batch stays the same. The
remaining and new ranks divide it in proportion to their maximum micro-batch sizes (the run's
`batches`). If a rank's share exceeds its maximum micro-batch size, all ranks take several
micro-steps.

The leader is the first rank of the run's first node. It writes the checkpoints and the run's
record. It also writes one file per start of the workers.

With B samples in the global batch and n samples in a micro-batch of a rank:

    loss of a step = sum over ranks and micro-steps of n / B x (mean loss of the n samples)
"""

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
from torch.nn.parallel import DistributedDataParallel

from .checkpoint import Checkpoints
from .device import backend, now
from .entrypoint import LoadedWorkload, try_once
from .launch import Worker, explain
from .loader import running_workers
from .processes import EXIT_ITEM_FAILED, EXIT_LOST_PEER, die_with_parent, leave, seconds_since_start
from .steps import take_step
from .strategies.replicas import of_ranks
from .worker import lost_peer

_MARK = struct.Struct("<qd")  # the number of finished steps, and the Unix time of the last step
_LATE_S = 5.0  # seconds by which other workers may start later than this one


def shares(global_batch: int, batches: Sequence[int]) -> list[list[int]]:
    """Divide `global_batch` samples among ranks, and return the micro-batch sizes of each rank.

    Samples are divided in proportion to `batches`, up to rounding. Every rank gets at least one
    sample. All ranks get equally many micro-batches. A micro-batch may be empty, except the last
    micro-batch of a rank. For example, `shares(3, [1, 1])` is `[[1, 1], [0, 1]]`.

    global_batch: the number of samples, which must be at least the number of ranks.
    batches: the maximum micro-batch size of each rank.
    """
    exact = [global_batch * batch / sum(batches) for batch in batches]
    samples = [1] * len(batches)
    for _ in range(global_batch - len(batches)):
        behind = max(range(len(batches)), key=lambda rank: exact[rank] - samples[rank])
        samples[behind] += 1
    steps = max(-(-count // most) for count, most in zip(samples, batches, strict=True))
    return [[(count + step) // steps for step in range(steps)] for count in samples]


class ElasticRun(Worker):
    """One rank of an elastic run, in a worker process that torchrun has started or restarted.

    leads: True for the leader, the first rank of the run's first node.
    """

    def __init__(self) -> None:
        super().__init__()
        [self.item] = self.plan.items
        self.leads = self.node == self.plan.host and self.reports
        self.checkpoints = Checkpoints(Path(self.plan.checkpoints))

    def join(self) -> None:
        """Join the process group of all ranks. Raises DistError if a rank joins too late."""
        rank, ranks = self.rank, int(os.environ["WORLD_SIZE"])
        patience = timedelta(seconds=self.patience_s())
        timeout = timedelta(seconds=self.plan.timeout_s)
        store = dist.TCPStore(  # type: ignore[attr-defined]
            *self.master, ranks, rank == 0, patience, multi_tenant=True
        )
        store.set_timeout(timeout)
        dist.init_process_group(
            backend(self.device), timeout=timeout, store=store, rank=rank, world_size=ranks
        )

    def patience_s(self) -> float:
        """Return the maximum seconds to wait for the other ranks to join.

        At the first start, the limit is the plan's `timeout_s`. After a restart, all ranks start
        together, so the limit is shorter. The limit doubles after each failed attempt to join.
        """
        # torchrun does not notify the workers if a machine is lost before all ranks have joined
        starts = len(self.checkpoints.read("start"))
        if not starts:
            return self.plan.timeout_s
        failed = max(0, int(os.environ["TORCHELASTIC_RESTART_COUNT"]) - starts)
        return min(self.plan.timeout_s, (_LATE_S + seconds_since_start()) * 2.0**failed)

    def restore(self, built: LoadedWorkload) -> dict[str, Any]:
        """Restore model, optimizer and loss scaler from the newest checkpoint, if there is one.

        All ranks must read the same checkpoint folder. Keys of the result:

            step: number of finished steps; 0 if there is no checkpoint.
            restore_s: seconds of the restore; None if there is no checkpoint.
            restore_bytes: size of the restored checkpoint; None if there is no checkpoint.
        """
        began = now(self.device)
        manifest, state = self.checkpoints.newest(self.device) or ({"step": 0, "bytes": None}, {})
        for name, values in state.items():
            built.stateful[name].load_state_dict(values)
        restore_s = now(self.device) - began if state else None
        # a new seed, so that this start does not repeat the samples of an earlier start
        torch.manual_seed(self.item.seed + 1000 * (self.rank + 1) + manifest["step"])
        if built.loader is not None:
            built.loader.seed += manifest["step"]
            built.loader.close()
        return {
            "step": manifest["step"],
            "restore_s": restore_s,
            "restore_bytes": manifest["bytes"],
        }

    def train(self, built: LoadedWorkload) -> dict[str, Any]:
        """Restore the newest checkpoint, and train to the last step.

        The leader returns the values for the run's record. The other ranks return {}. The leader
        raises FloatingPointError if the loss at a checkpoint is not finite.
        """
        item, nodes = self.item, of_ranks(self.node, dist.group.WORLD)
        global_batch = item.accumulation_steps * sum(item.batch_by_rank)
        by_rank = shares(global_batch, [item.batches[item.nodes.index(node)] for node in nodes])
        start = self.restore(built)
        module = DistributedDataParallel(built.model)
        self.wait_for_go({})
        self.begin(item)
        step = start["step"]
        if self.leads:
            # the leader stores the number of finished steps in this file after each step
            path = self.mailbox / f"node-{self.node}" / f"elastic-{item.run_id}"
            mark = os.open(path, os.O_RDWR | os.O_CREAT)
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
        sizes = by_rank[self.rank]
        with running_workers(built.loader):
            while step < item.most_steps:
                loss = take_step(built, module, sizes, scale=len(nodes) / global_batch)
                step += 1
                if self.leads:
                    os.pwrite(mark, _MARK.pack(step, time.time()), 0)
                if step % item.checkpoint_every == 0 or step == item.most_steps:
                    self.checkpoint(built, step, loss * sum(sizes) / global_batch)
        if not self.leads:
            return {}
        written = self.checkpoints.read("step")
        return {
            "steps": item.most_steps,
            "first_loss": written[0]["loss"],
            "last_loss": written[-1]["loss"],
            **built.sizes,
            "starts": self.checkpoints.read("start"),
            "checkpoints": written,
        }

    def checkpoint(self, built: LoadedWorkload, step: int, partial_loss: float) -> None:
        """Write the checkpoint of step number `step`, if this rank is the leader.

        Every rank must call this method. The loss of the step is the sum of `partial_loss` over all
        ranks. The leader raises FloatingPointError if this loss is not finite.
        """
        loss = sum(of_ranks(partial_loss, dist.group.WORLD))
        if not self.leads:
            return
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} after {step} steps: it must be finite")
        self.checkpoints.write(step, built.state(), loss=loss)


def main() -> None:
    """Run this rank as a worker process of torchrun. After a failure, log the reason and exit.

    If another rank was lost, torchrun then restarts the remaining workers. After any other failure,
    the run is recorded as failed before the exit.
    """
    die_with_parent()
    run = ElasticRun()
    try:
        built = run.load(run.item)
        if not run.checkpoints.read("start"):  # a start file shows that the workload trains
            try_once(built, run.item.batches[run.item.nodes.index(run.node)])
        run.join()
        values = run.train(built)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        reason = f"node {run.node}: {explain(error, run.plan.workload(run.item))}"
        if lost_peer(error):  # torchrun restarts the remaining workers
            leave(EXIT_LOST_PEER, f"a peer was lost: {reason}")
        run.write_record(run.item, reason)
        leave(EXIT_ITEM_FAILED, f"{run.item.run_id} failed on {reason}")
    if run.leads:
        run.started_unix = values["starts"][0]["began_unix"]
        run.write_record(run.item, values=values)
    built.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
