"""Run a few steps of a workload on this machine's CPU, to find mistakes before renting machines.

`python -m node.check ANSWER` reads a JSON object from standard input, and writes a JSON list to the
file ANSWER. Keys of the object:

    workload      the fields of a WorkloadFile
    folder        the folder with the workload's code
    precisions    the precisions in which to run steps
    strategies    the workload's strategies
    batch         samples per step

The list has one dictionary per precision, with the keys that `check_precision` documents.

Strategies that should train exactly like ddp are also compared with ddp, in fp32. If a comparison
fails, its error message becomes the `problem` of the first dictionary whose `problem` is empty. Its
`notes` name the strategies that could not be compared.
"""

import json
import logging
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

from .data_paths import DataMissing
from .device import reset_peak
from .entrypoint import LoadedWorkload, WorkloadError, build, try_once
from .equivalence import compare
from .launch import explain
from .loader import sizes
from .precision import Arithmetic, NoSuchPrecision
from .processes import die_with_parent
from .profiler import thread_counters
from .record import Item, WorkloadFile
from .repetition import Patience
from .steps import train
from .strategies.refusals import EQUAL_TO_DDP, fits

_BUSY = 0.2  # warn if steps wait for a CPU for at least this fraction of their time
_NAMED = 3  # maximum number of parameters that a message names
_CPU = torch.device("cpu")
_HINTS = {  # a pattern of the error's text, and the advice for such errors
    "Torch not compiled with CUDA|No CUDA GPUs are available|Found no NVIDIA driver": "remove"
    ' `.cuda()`, `.to("cuda")` and `device="cuda"`: Srift moves model, loss and batches to each'
    " machine's device",
    "^ModuleNotFoundError|^KeyError|No such file|num_samples=0|loader has 0 samples": "only the"
    " workload's code is copied: state packages in `requirements`, files in `data`, and environment"
    " variables in `env`",
    "fewer than a batch of": "the check uses a quarter of `global_batch`: lower `global_batch`",
}


def main() -> None:
    """Check the workload that standard input describes. Exit with 0 even if the workload fails."""
    die_with_parent()
    question = json.load(sys.stdin)
    workload = WorkloadFile(**question["workload"])
    folder, batch = Path(question["folder"]), question["batch"]
    # A CPU cannot compute in tf32.
    precision = next((name for name in question["precisions"] if name != "tf32"), "fp32")
    # Compare first, because `compare_with_ddp` forks processes and this process has no threads yet.
    notes = list[str]()
    problems = [
        compare_with_ddp(folder, workload, name, precision, batch=batch, notes=notes)
        for name in question["strategies"]
        if name in EQUAL_TO_DDP
    ]
    answers = [
        check_precision(folder, workload, name, batch=batch) for name in question["precisions"]
    ]
    first = next((answer for answer in answers if not answer["problem"]), answers[0])
    first["problem"] = first["problem"] or "; ".join(filter(None, problems))
    first["notes"] += notes
    Path(sys.argv[1]).write_text(json.dumps(answers))


class NotCompared(Exception):
    """The losses could not be compared with ddp's. The message says why."""


def compare_with_ddp(
    folder: Path,
    workload: WorkloadFile,
    name: str,
    precision: str,
    *,
    batch: int,
    notes: list[str],
) -> str:
    """Check that strategy `name` has the same losses as ddp. Return "", or an error message.

    Strategy and ddp train in fp32 on this machine's CPU. Their losses may differ by rounding
    errors. The result is also "" if the data are in S3, if memory is too small for ddp, or if ddp
    raises RuntimeError. In the last two cases, this function adds the reason to `notes`.

    batch: the workload's samples per step. Each rank trains with min(batch, 2) samples per step.
    precision: a precision of the workload. The result is an error message if the strategy does not
        support this precision.
    """
    ranks = next(count for count in (2, 4, 8) if fits(name, [1] * count))
    item = Item(
        run_id="check",
        kind="train",
        nodes=[*range(ranks)],
        batches=[batch] * ranks,
        strategy=name,
        precision=precision,
    )
    file = f"file://{sys.argv[1]}-{name}"

    def train(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=file, rank=rank, world_size=ranks)
        computing = Arithmetic(precision, _CPU)
        built = partial(build, folder, workload, seed=0, rank=rank, computing=computing)
        if reason := compare(item, built, dist.group.WORLD):
            raise NotCompared(reason)

    logging.getLogger("torch.multiprocessing").setLevel(
        logging.CRITICAL
    )  # do not log failed processes
    try:
        start_processes(train, nprocs=ranks, start_method="fork")  # type: ignore[no-untyped-call]
    except ProcessException as error:
        line = str(error).splitlines()[-1]
        kind, _, words = line.partition(": ")  # `module.ErrorClass: message`
        if kind.endswith(NotCompared.__name__):
            notes.append(words)
        elif not kind.endswith(DataMissing.__name__):
            return f"strategy {name}: {words or line}"
    return ""


def check_precision(
    folder: Path, workload: WorkloadFile, precision: str, *, batch: int
) -> dict[str, Any]:
    """Run two steps of `workload` in `precision`, and return the result.

    batch: the number of samples per step.

    Keys of the result:

        precision: the precision that was checked.
        problem: why the workload fails; "" if the steps succeeded, the data are in S3, or the CPU
            does not support the precision.
        notes: a list of warnings about probable mistakes.
        figures: a dictionary of measured values; None if the steps failed or were not run.

    Keys of `figures`:

        step_s, peak_bytes and other values that `steps.train` measures.
        losses: the first and the last loss.
        input_s: seconds per step to make a batch or to wait for the loader.
        queued_share: fraction of the steps' time in which this thread waited for a free CPU core.
    """
    answer: dict[str, Any] = {"precision": precision, "problem": "", "notes": [], "figures": None}
    built = None
    try:
        reset_peak(_CPU)
        built = build(folder, workload, seed=0, rank=0, computing=Arithmetic(precision, _CPU))
        answer["figures"] = _train(built, batch)
        answer["notes"] = list(_notes(built, batch, answer["figures"], workload))
    except NoSuchPrecision as error:
        answer["notes"] = [f"not checked in {precision}: {error}"]
    except DataMissing:
        answer["notes"] = [
            f"no step was run, because the data {workload.data} are not on this machine."
            " To check the steps too, set `data` to a local folder with some samples"
        ]
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}"
        hints = [hint for pattern, hint in _HINTS.items() if re.search(pattern, text)]
        answer["problem"] = "; ".join([explain(error, workload), *hints])
    finally:
        if built is not None:
            built.close()
    return answer


def _train(built: LoadedWorkload, batch: int) -> dict[str, Any]:
    """Run a backward pass and two training steps, and return the measured values.

    The result is a dictionary. The docstring of `check_precision` lists its keys, under `figures`.

    Raises WorkloadError if a trainable parameter gets no gradient, because data parallelism would
    wait forever for this gradient. Raises NotMeasured if the training diverges. Also raises the
    errors of the workload.
    """
    # Look for gradients before the first step, because hooks of the optimizer may remove gradients.
    built.arithmetic.backward(built.loss_of(built.model, batch))
    idle = [
        name
        for name, weights in built.model.named_parameters()
        if weights.requires_grad
        and weights.grad is None
        and not weights._post_accumulate_grad_hooks
    ]
    built.model.zero_grad()
    if idle:
        raise WorkloadError(
            f"the parameters {', '.join(idle[:_NAMED])} get no gradient, so data"
            " parallelism would wait forever for their gradients. Use the parameters in the forward"
            " pass, or set their requires_grad to False"
        )
    # The first step of a process is several times slower, so only the second step is timed.
    item = Item(
        run_id="check",
        kind="train",
        nodes=[0],
        batches=[batch],
        warmup_steps=1,
        least_steps=1,
        most_steps=1,
    )
    queued_s = thread_counters()[2]
    figures = train(item, built, None, Patience())
    queued_s = thread_counters()[2] - queued_s
    return figures | {
        "losses": [figures["first_loss"], figures["last_loss"]],
        "queued_share": queued_s / (figures["warmup_s"] + figures["step_s"]),
    }


def _notes(
    built: LoadedWorkload, batch: int, figures: dict[str, Any], workload: WorkloadFile
) -> Iterator[str]:
    """Yield warnings about probable mistakes in the workload.

    figures: the values that `_train` measured in the training steps.
    """
    if built.loader is None and batch not in sizes(built.make_batch(batch)):
        yield f"make_batch({batch}) returned no tensor with {batch} in its shape"
    held = {weights for group in built.optimizer.param_groups for weights in group["params"]}
    left = [
        name
        for name, weights in built.model.named_parameters()
        if weights.requires_grad and weights not in held
    ]
    if left:
        yield (
            f"the optimizer does not train {', '.join(left[:_NAMED])}, so their gradients are"
            " exchanged but not used"
        )
    if figures["queued_share"] >= _BUSY:
        yield f"busy: steps waited for a CPU for {figures['queued_share']:.0%} of their time"
    try:
        try_once(built, 1)
    except Exception as error:
        yield (
            "a batch of 1 sample fails, but Srift may use this batch size on a slow machine:"
            f" {explain(error, workload)}"
        )


if __name__ == "__main__":
    main()
