"""A Python file that gives each torchrun process its share of a batch, and the command that starts each machine's."""

from __future__ import annotations

from typing import Any

from .choice import Choice, Ranked
from .orchestrators import PORT, as_comment

_FILE = "srift_shares.py"
_BODY = '''
import contextlib
import sys

import torch
import torch.distributed as dist

DEVICES = {devices!r}  # processes of each node, in the order of --node-rank
BATCH_PER_DEVICE = {batches!r}  # samples of each of its processes in a micro-step
ACCUMULATION_STEPS = {steps!r}  # micro-steps of one optimizer step
SHARES = [batch for count, batch in zip(DEVICES, BATCH_PER_DEVICE) for _ in range(count)]  # by rank


class SharesSampler(torch.utils.data.Sampler):
    """A rank's batches, one a micro-step: DataLoader(data, batch_sampler=SharesSampler(len(data), rank))."""

    def __init__(self, size, rank, seed=0):
        self.size, self.rank, self.seed, self.epoch = size, rank, seed, 0  # count `epoch` up for another order

    def __len__(self):  # samples that are too few for a whole step wait for an epoch in which they are not the last
        return self.size // (ACCUMULATION_STEPS * sum(SHARES)) * ACCUMULATION_STEPS

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        for micro_step in range(len(self)):
            begin = micro_step * sum(SHARES) + sum(SHARES[: self.rank])
            yield order[begin : begin + SHARES[self.rank]]


def train_step(model, optimizer, loss_of, batches):
    """One optimizer step of this rank with its ACCUMULATION_STEPS `batches` of inputs and targets.

    `model` is a DistributedDataParallel, which averages gradients over ranks: the mean loss of a rank counts by its
    share, so that each sample of the global batch counts the same.
    """
    weight = SHARES[dist.get_rank()] * len(SHARES) / sum(SHARES) / ACCUMULATION_STEPS
    optimizer.zero_grad()
    for number, (inputs, targets) in enumerate(batches, 1):
        with contextlib.nullcontext() if number == ACCUMULATION_STEPS else model.no_sync():
            (weight * loss_of(model(inputs), targets)).backward()
    optimizer.step()


def main():
    """Started by the commands above as it is: each rank says its share, and that no sample is another rank's too."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks != len(SHARES):
        raise SystemExit(f"torchrun started {{ranks}} processes, and the shares are of {{len(SHARES)}}")
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 10 * ACCUMULATION_STEPS * sum(SHARES)
    mine = [sample for batch in SharesSampler(size, rank) for sample in batch]
    everyone = [None] * ranks
    dist.all_gather_object(everyone, mine)
    seen = [sample for part in everyone for sample in part]
    if len(set(seen)) != len(seen):
        raise SystemExit("a sample was seen twice in an epoch")
    share = f"{{SHARES[rank]}} of {{sum(SHARES)}} samples a micro-step"
    print(f"rank {{rank}}: {{share}}, {{len(mine)}} of {{size}} an epoch; all ranks {{len(seen)}}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''


def torchrun(choice: Choice) -> tuple[Any, str]:
    """The split and the command of each machine; and a Python file with them and the sampler of the shares.

    Machines of any provider, of one type or several.
    """
    first = choice.first
    commands = [_command(first, node) for node in range(first.machines)]
    body = {
        "devices": first.layout,
        "batch_per_device": first.batches,
        "accumulation_steps": first.accumulation_steps,
        **first.mode._asdict(),
        "commands": commands,
    }
    kinds = [group.instance_type for group in first.groups for _ in range(group.count)]
    said = [
        *choice.about,
        *_how(first),
        f"save as {_FILE} on each machine; import SharesSampler and train_step from it, and start your own script so:",
        *(
            f"node {node} ({kind}): {command}"
            for node, (kind, command) in enumerate(zip(kinds, commands, strict=True))
        ),
    ]
    text = _BODY.format(devices=first.layout, batches=first.batches, steps=first.accumulation_steps)
    return body, as_comment(said) + text.rstrip("\n")


def _command(one: Ranked, node: int) -> str:
    rendezvous = f"--master-addr ADDRESS-OF-NODE-0 --master-port {PORT}"
    return f"torchrun --nnodes {one.machines} --node-rank {node} --nproc-per-node {one.layout[node]} {rendezvous} {_FILE}"


def _how(one: Ranked) -> list[str]:
    """What of the row the file does not do."""
    mode, said = one.mode, list[str]()
    if mode.precision == "fp32":
        said.append("fp32 was measured with TF32 switched off; with TF32 the step is another")
    elif mode.precision == "tf32":
        said.append('tf32: torch.set_float32_matmul_precision("high") before the first step')
    else:
        scaler = " and a GradScaler" if mode.precision == "fp16" else ""
        said.append(
            f"{mode.precision}: compute loss_of(model(inputs), targets) under torch.autocast{scaler}"
        )
    if mode.of_several:
        said.append(f"strategy {mode.strategy}: wrap the model by it; train_step is of ddp")
    if mode.switches != "none":
        said.append(f"switches {mode.switches}: yours to turn on")
    return said
