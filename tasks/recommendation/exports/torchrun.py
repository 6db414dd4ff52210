"""Export a Python file with the batch size of each process, and the torchrun commands."""

from typing import Any

from ...reporting.progress import Row
from .selection import MODE, PORT, Selection, as_comment

FILE = "srift_shares.py"
_PRECISIONS = {
    "fp32": "fp32 was measured with TF32 disabled",
    "tf32": 'tf32: call torch.set_float32_matmul_precision("high") before the first step',
    "bf16": "bf16: compute the loss under torch.autocast",
    "fp16": "fp16: compute the loss under torch.autocast and a GradScaler",
}
_BODY = '''
import contextlib
import sys

import torch
import torch.distributed as dist

DEVICES = {devices!r}  # processes of each node, in the order of --node-rank
BATCH_PER_DEVICE = {batches!r}  # samples of each process of a node in a micro-step
ACCUMULATION_STEPS = {steps!r}  # micro-steps of one optimizer step
# samples of each rank in a micro-step
SHARES = [batch for count, batch in zip(DEVICES, BATCH_PER_DEVICE) for _ in range(count)]


class SharesSampler(torch.utils.data.Sampler):
    """The batches of one rank: DataLoader(data, batch_sampler=SharesSampler(len(data), rank))."""

    def __init__(self, size, rank, seed=0):
        # Increase `epoch` to shuffle again.
        self.size, self.rank, self.seed, self.epoch = size, rank, seed, 0

    def __len__(self):  # an incomplete last step is left out
        return self.size // (ACCUMULATION_STEPS * sum(SHARES)) * ACCUMULATION_STEPS

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=generator).tolist()
        for micro_step in range(len(self)):
            begin = micro_step * sum(SHARES) + sum(SHARES[: self.rank])
            yield order[begin : begin + SHARES[self.rank]]


def train_step(model, optimizer, loss_of, batches):
    """Run one optimizer step of this rank. `batches` has ACCUMULATION_STEPS (inputs, targets).

    DistributedDataParallel averages gradients over ranks. The mean loss of a rank is weighted by
    the rank's share, so that every sample of the global batch counts the same.
    """
    weight = SHARES[dist.get_rank()] * len(SHARES) / sum(SHARES) / ACCUMULATION_STEPS
    optimizer.zero_grad()
    for number, (inputs, targets) in enumerate(batches, 1):
        with contextlib.nullcontext() if number == ACCUMULATION_STEPS else model.no_sync():
            (weight * loss_of(model(inputs), targets)).backward()
    optimizer.step()


def main():
    """Print the share of each rank and check that no sample is seen twice."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks != len(SHARES):
        raise SystemExit(f"torchrun started {{ranks}} processes, expected {{len(SHARES)}}")
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 10 * ACCUMULATION_STEPS * sum(SHARES)
    mine = [sample for batch in SharesSampler(size, rank) for sample in batch]
    everyone = [None] * ranks
    dist.all_gather_object(everyone, mine)
    seen = [sample for part in everyone for sample in part]
    if len(set(seen)) != len(seen):
        raise SystemExit("a sample was seen twice in an epoch")
    share = f"{{SHARES[rank]}} of {{sum(SHARES)}} samples a micro-step"
    epoch = f"{{len(mine)}} of {{size}} an epoch; all ranks {{len(seen)}}"
    print(f"rank {{rank}}: {{share}}, {{epoch}}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''


def torchrun(selection: Selection) -> tuple[Any, str]:
    """Return the document of `srift export --json`, and the text of a Python file.

    The document and the file have the batch of each process and the torchrun commands. The file
    also has a batch sampler and a training step.
    """
    first, row = selection.first, selection.first.row
    commands = [
        f"torchrun --nnodes {first.machines} --node-rank {node} --nproc-per-node {devices}"
        f" --master-addr ADDRESS-OF-NODE-0 --master-port {PORT} {FILE}"
        for node, devices in enumerate(first.layout)
    ]
    document = {
        "devices": first.layout,
        "batch_per_device": first.batches,
        **{name: row[name] for name in MODE},
        "commands": commands,
    }
    notes = [
        *selection.about,
        *_training_notes(row),
        f"save this file as {FILE} on each machine, import SharesSampler and train_step from it,"
        " and start your own script like this:",
        *(f"node {node}: {command}" for node, command in enumerate(commands)),
    ]
    text = _BODY.format(
        devices=first.layout, batches=first.batches, steps=row["accumulation_steps"]
    )
    return document, as_comment(notes) + text.rstrip("\n")


def _training_notes(row: Row) -> list[str]:
    """Return notes on the precision, strategy and switches that the user's script must set up."""
    notes = [_PRECISIONS[row["precision"]]]
    if row["strategy"] != "ddp":
        notes.append(f"strategy {row['strategy']}: train_step supports ddp only")
    if row["switches"] != "none":
        notes.append(f"switches {row['switches']}: enable them in your script")
    return notes
