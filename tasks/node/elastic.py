"""The worker of an elastic run: trains with whoever is there, and resumes from the newest
checkpoint when that changes.

torchrun ends and starts it whenever a node is lost or joins. Its global batch stays the same: those
that are there share it out as the item's batches say, in as many micro-steps as keep each device
within its own. The first rank of the item's first node writes checkpoints, notes what happened, and
in the end the run's record.

    loss of a step = sum over ranks and micro-steps of n / B x (mean loss of n samples)
"""

from __future__ import annotations

import argparse
import math
import os
import struct
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .checkpoint import Checkpoints
from .data import data_path
from .device import NoSuchDevice, backend, name_of, now, own_device
from .entrypoint import LoadedWorkload, WorkloadError, build, try_once
from .launch import explain, leave
from .loader import running
from .measuring import gather
from .precision import arithmetic
from .processes import (
    EXIT_ITEM_FAILED,
    EXIT_LOST_PEER,
    EXIT_MAILBOX,
    EXIT_NO_DEVICE,
    die_with_parent,
    seconds_since_start,
)
from .record import Devices, Item, Plan, RankLayout, plan_from_json, record_of, write_json
from .strategies import DDP, no_sync, strategy
from .switches import NONE
from .worker import lost_peer

_MARK = struct.Struct("<qd")  # the last step that was done, and when
_LATE_S = 5.0  # at least, that one worker may come to a meeting after another


@dataclass(frozen=True, slots=True)
class Share:
    """Samples of each rank in a step, and the number of micro-steps."""

    samples: tuple[int, ...]
    micro_steps: int

    def micro_batches(self, rank: int) -> list[int]:
        """Sizes of one rank's micro-batches, the largest last: that one communicates. Some may be
        0.
        """
        whole, more = divmod(self.samples[rank], self.micro_steps)
        return [whole] * (self.micro_steps - more) + [whole + 1] * more


def shares(global_batch: int, batches: Sequence[int]) -> Share:
    """Share `global_batch` in proportion to `batches`, the most samples that each rank takes at
    once.

    By largest remainders: equal ranks differ by at most one sample. Raises ValueError for a batch
    smaller than the number of ranks.
    """
    if global_batch < len(batches) or min(batches) < 1:
        raise ValueError(
            f"a batch of {global_batch} cannot be shared by {len(batches)} ranks of {list(batches)}"
        )
    exact = [global_batch * one / sum(batches) for one in batches]
    samples = [max(1, math.floor(one)) for one in exact]
    by_rest = sorted(range(len(batches)), key=lambda rank: samples[rank] - exact[rank])
    for rank in by_rest[: global_batch - sum(samples)]:
        samples[rank] += 1
    for rank in reversed(by_rest):  # where some had to be raised to one sample
        samples[rank] -= min(samples[rank] - 1, max(0, sum(samples) - global_batch))
    steps = max(-(-count // most) for count, most in zip(samples, batches, strict=True))
    return Share(tuple(samples), steps)


class ElasticRun:
    """One rank's part in the run, from this start of its worker."""

    def __init__(self, mailbox: Path, plan: Plan, item: Item, node: int) -> None:
        self.mailbox, self.plan, self.item, self.node = mailbox, plan, item, node
        self.started_unix = time.time()
        self.node_folder = mailbox / f"node-{node}"
        self.device = own_device(plan.expected[node])
        self.leads = node == RankLayout.of(plan).host and os.environ["LOCAL_RANK"] == "0"
        self.checkpoints = Checkpoints(Path(plan.checkpoints))
        self.workload = next((one for one in plan.workloads if one.name == item.workload), None)
        threads = torch.get_num_threads()
        self.devices = [
            Devices(name=name_of(self.device), count=used, threads=threads) for used in item.used
        ]
        self.nodes: list[int] = []  # of each rank, once they met
        self.restored_unix = 0.0

    @property
    def mark_path(self) -> Path:
        """The leading rank's file of the last step that was done, on the node's disk."""
        return self.node_folder / f"elastic-{self.item.run_id}"

    def built(self) -> LoadedWorkload:
        """Build the workload; before the first checkpoint, try one pass. Raises what is wrong with
        it.
        """
        item, workload = self.item, self.workload
        if workload is None:
            raise WorkloadError(f"the plan names no workload {item.workload!r}")
        if item.strategy != DDP or item.switches != NONE:
            named = f"{item.strategy}, switches {item.switches}"
            raise ValueError(
                f"an elastic run in {named}: each rank must hold the whole state; take {DDP}"
            )
        found = build(
            self.node_folder / "scratch" if workload.folder else self.mailbox,
            replace(workload, data=data_path(self.mailbox, workload) if workload.data else ""),
            seed=item.seed,
            rank=int(os.environ["RANK"]),
            computing=arithmetic(item.precision, self.device),
        )
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
        self.nodes = [int(one[0]) for one in gather([self.node], dist.group.WORLD)]

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

    def restore(self, built: LoadedWorkload, rank: int) -> tuple[int, dict[str, Any]]:
        """Restore model, optimizer and generator; return the step to resume from, and what that
        took.

        A new rank draws from another seed. Raises RuntimeError if ranks found different steps.
        """
        began = now(self.device)
        found = self.checkpoints.newest(self.device)
        step = 0
        taken: dict[str, Any] = {"restore_s": None, "restore_bytes": None}
        if found is not None:
            manifest, state = found
            step = int(manifest["step"])
            built.model.load_state_dict(state["model"])
            built.optimizer.load_state_dict(state["optimizer"])
            if built.arithmetic.scaler is not None:
                built.arithmetic.scaler.load_state_dict(state["scaler"])
            if rank < len(state["generators"]):
                self.set_generators(state["generators"][rank])
            else:
                torch.manual_seed(self.item.seed + 1000 * (rank + 1) + step)
            taken = {"restore_s": now(self.device) - began, "restore_bytes": int(manifest["bytes"])}
        steps = [int(one[0]) for one in gather([step], dist.group.WORLD)]
        if len(set(steps)) > 1:
            raise RuntimeError(
                f"ranks found checkpoints of steps {sorted(set(steps))}: they see different folders"
            )
        return step, taken

    def generators(self) -> list[torch.Tensor]:
        """Return the state of this rank's random numbers, on the CPU and on its GPU."""
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return states

    def set_generators(self, states: Sequence[torch.Tensor]) -> None:
        torch.set_rng_state(states[0].cpu())
        if self.device.type == "cuda" and len(states) > 1:
            torch.cuda.set_rng_state(states[1].cpu(), self.device)

    def start(self, step: int, share: Share, taken: dict[str, Any]) -> None:
        """Note how this start began; by the leading rank alone."""
        last_step, last_unix = _read_mark(self.mark_path)
        start = {
            "nodes": self.nodes,
            "batches": list(share.samples),
            "micro_steps": share.micro_steps,
            "step": step,
        }
        start |= {"lost_steps": max(0, last_step - step), "last_unix": last_unix, **taken}
        self.checkpoints.note_start(
            start | {"restored_unix": self.restored_unix, "began_unix": time.time()}
        )

    def train(self, built: LoadedWorkload) -> dict[str, Any]:
        """Train to the last step; return the record's values at the leading rank. Raises
        FloatingPointError.
        """
        item, nodes, rank = self.item, self.nodes, dist.get_rank()
        global_batch = item.accumulation_steps * sum(
            n * b for n, b in zip(item.used, item.batches, strict=True)
        )
        share = shares(global_batch, [item.batches[item.nodes.index(node)] for node in nodes])
        step, taken = self.restore(built, rank)
        module = built.model
        if len(nodes) > 1:
            assert dist.group.WORLD is not None
            module = strategy(DDP)(built.model, built.optimizer, dist.group.WORLD, self.device)
        self.restored_unix = time.time()
        self.wait_for_go()
        sizes = share.micro_batches(rank)
        mark = os.open(self.mark_path, os.O_RDWR | os.O_CREAT) if self.leads else -1
        if self.leads:
            self.start(step, share, taken)
        partial_loss, at = math.nan, step
        with running(built.loader):
            began = now(self.device)
            while step < item.most_steps:
                partial_loss = one_step(built, module, sizes, global_batch, len(nodes))
                step += 1
                if self.leads:
                    os.pwrite(mark, _MARK.pack(step, time.time()), 0)
                if step % item.checkpoint_every == 0 or step == item.most_steps:
                    about = {"steps": step - at, "steps_s": now(self.device) - began}
                    self.checkpoint(built, step, partial_loss, about)
                    at, began = step, now(self.device)
        return self.values(built) if self.leads else {}

    def checkpoint(
        self, built: LoadedWorkload, step: int, partial_loss: float, about: dict[str, Any]
    ) -> None:
        """Write the state after `step`. Raises FloatingPointError if the loss is no number."""
        gathered: list[Any] | None = [None] * dist.get_world_size() if self.leads else None
        dist.gather_object((self.generators(), partial_loss), gathered, dst=self.leader)
        if gathered is None:
            return
        loss = sum(one[1] for one in gathered)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} after {step} steps: not a number to train with"
            )
        state = {
            "step": step,
            "model": built.model.state_dict(),
            "optimizer": built.optimizer.state_dict(),
        }
        state |= {"generators": [one[0] for one in gathered]}
        if built.arithmetic.scaler is not None:
            state["scaler"] = built.arithmetic.scaler.state_dict()
        self.checkpoints.write(step, state, loss=loss, **about)

    @property
    def leader(self) -> int:
        """The rank that leads, of the node at which all meet."""
        return self.nodes.index(RankLayout.of(self.plan).host)

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
            "checkpoints": [{name: one[name] for name in columns} for one in written],
        }

    def wait_for_go(self) -> None:
        """Report that this node is ready, and wait for the controller; after a restart at once."""
        if os.environ["LOCAL_RANK"] == "0":
            self.put(f"armed-{self.plan.attempt}.json", {"armed_unix": time.time()})
        while not (self.mailbox / f"go-{self.plan.attempt}.json").exists():
            time.sleep(0.05)
        if os.environ["LOCAL_RANK"] == "0":
            self.put(
                "progress.json",
                {"attempt": self.plan.attempt, "run_id": self.item.run_id, "index": 0},
            )

    def record(self, problem: str, values: dict[str, Any] | None = None) -> None:
        """Write the run's record; of a failure, by the rank that failed."""
        starts = (values or {}).get("starts") or [{"began_unix": self.started_unix}]
        record = record_of(
            self.plan,
            self.item,
            started_unix=starts[0]["began_unix"],
            problem=problem,
            values=values,
            devices=self.devices,
        )
        self.put(f"records/{self.item.run_id}.json", record)

    def put(self, name: str, body: Any) -> None:
        """Write into the node's folder, or end with the reason."""
        try:
            write_json(self.node_folder / name, body)
        except OSError as error:
            leave(
                EXIT_MAILBOX,
                f"node {self.node} could not write {name}: {error.strerror}; free some space there",
            )


def one_step(
    built: LoadedWorkload, module: nn.Module, sizes: Sequence[int], global_batch: int, ranks: int
) -> float:
    """Run one optimizer step over this rank's micro-batches; return its part of the step's loss."""
    built.optimizer.zero_grad(set_to_none=True)
    partial_loss = 0.0
    for micro, size in enumerate(sizes):
        if not size:
            continue
        with nullcontext() if micro == len(sizes) - 1 else no_sync(module):
            loss = built.loss_of(module, size)
            built.arithmetic.backward(
                loss * (ranks * size / global_batch)
            )  # gradients are averaged over ranks
        partial_loss += float(loss.detach()) * size / global_batch
    built.arithmetic.update(built.optimizer)
    return partial_loss


def _read_mark(path: Path) -> tuple[int, float | None]:
    """Return the last step that was done and when; 0 and None before any."""
    try:
        step, unix = _MARK.unpack(path.read_bytes())
    except (OSError, struct.error):
        return 0, None
    return int(step), float(unix)


def main() -> None:
    """Serve one start. Exits 0 once the steps are done, else with the reason as the log's last
    line.
    """
    parser = argparse.ArgumentParser(prog="node.elastic")
    parser.add_argument("--mailbox", type=Path, required=True)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument(
        "--place", type=int, required=True, help="index of this node: --node is torchrun's own"
    )
    given = parser.parse_args()
    die_with_parent()
    plan = plan_from_json(given.plan.read_text())
    item = plan.elastic
    if item is None:
        parser.error("the plan has no elastic item")
    try:
        run = ElasticRun(given.mailbox, plan, item, given.place)
    except NoSuchDevice as error:
        leave(EXIT_NO_DEVICE, str(error))
    try:
        built = run.built()
        run.join()
        values = run.train(built)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        reason = explain(error, run.workload)
        if lost_peer(error):  # torchrun starts this again, with those that are left
            leave(EXIT_LOST_PEER, f"node {run.node} lost a peer: {reason}")
        run.record(f"node {run.node}: {reason}")
        leave(EXIT_ITEM_FAILED, f"{item.run_id} ended on node {run.node}: {reason}")
    if run.leads:
        run.record("", values)
    built.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
