"""Two steps of a workload on this machine's processor, before any machine is bought: what is wrong,
and what it takes.

`python -m node.check ANSWER` reads a question from standard input and writes the answer to the file
ANSWER, both JSON: the workload as a plan has it, the `folder` that its code lies in, `precisions`
and the `batch` of one device; the answer lists what `checked` returns for each precision.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from .data import S3, DataMissing
from .device import now, peak_bytes, reset_peak
from .entrypoint import LoadedWorkload, WorkloadError, build, try_once
from .launch import explain
from .loader import sizes
from .precision import NoSuchPrecision, arithmetic
from .processes import die_with_parent
from .record import WorkloadFile
from .steps import one_step, typical_s

_STEPS = 2
_NAMED = 3  # parameters in a message
_SLOW_INPUT = 0.1  # of a step
_CPU = torch.device("cpu")
_HINTS = {  # what to do about an error, by its text
    "Torch not compiled with CUDA|No CUDA GPUs are available|Found no NVIDIA driver": "leave out"
    ' `.cuda()`, `.to("cuda")` and `device="cuda"`: Srift moves model, loss and batches to each'
    " machine's device",
    "^ModuleNotFoundError|^KeyError|No such file|num_samples=0|its loader is empty": "only its own"
    " code travels: state packages in `requirements`, files in `data`, variables in `env`",
    "fewer than a batch of": "a check tries a quarter of `global_batch`: lower it",
}


def main() -> None:
    """Answer one question. Exits 0 whatever is wrong with the workload."""
    die_with_parent()
    question = json.load(sys.stdin)
    workload = WorkloadFile(**question["workload"])
    folder, batch = Path(question["folder"]), question["batch"]
    answers = [checked(folder, workload, name, batch=batch) for name in question["precisions"]]
    Path(sys.argv[1]).write_text(json.dumps(answers))


def checked(folder: Path, workload: WorkloadFile, precision: str, *, batch: int) -> dict[str, Any]:
    """Return `precision`, the `problem` (empty if it trains or cannot be checked here), `notes` and
    `figures`.

    `figures`: step_s, input_s (of making a batch, or of a step's wait for its loader), losses,
    peak_bytes, parameters, gradient_bytes; None without any.
    """
    answer: dict[str, Any] = {"precision": precision, "problem": "", "notes": [], "figures": None}
    built = None
    try:
        reset_peak(_CPU)
        built = build(folder, workload, seed=0, rank=0, computing=arithmetic(precision, _CPU))
        answer["figures"] = _trained(built, batch)
        answer["notes"] = list(_notes(built, batch, answer["figures"], workload))
    except NoSuchPrecision as error:
        answer["notes"] = [f"not checked in {precision}: {error}"]
    except (Exception, SystemExit) as error:
        if isinstance(error, DataMissing) and workload.data.startswith(S3):
            answer["notes"] = [
                f"no step was made: its data, {workload.data}, are not on this machine. To check it"
                " with data, name a folder with some of them for the moment"
            ]
        else:
            text = f"{type(error).__name__}: {error}"
            hints = [hint for pattern, hint in _HINTS.items() if re.search(pattern, text)]
            answer["problem"] = "; ".join([explain(error, workload), *hints])
    finally:
        if built is not None:
            built.close()
    return answer


def _trained(built: LoadedWorkload, batch: int) -> dict[str, Any]:
    """Return figures of a few steps. Raises WorkloadError if no machine could train it
    with others.
    """
    try_once(built, batch)
    workers = 0
    if built.loader is not None:
        built.loader.as_in_later_epochs()
        workers = built.loader.workers  # each begins with a batch that nobody waited for
    losses, seconds, waits = [], [], []
    for _ in range(max(_STEPS, workers) + workers):
        started, waited = now(_CPU), built.waited_s
        losses.append(one_step(built, built.model, [batch], scale=1 / batch))
        seconds.append(now(_CPU) - started)
        waits.append(built.waited_s - waited)
    if not all(map(math.isfinite, losses)):
        raise WorkloadError(
            f"the loss is {losses[0]}, then {losses[-1]}: not a number to train with"
        )
    idle = [
        name
        for name, weights in built.model.named_parameters()
        if weights.requires_grad and weights.grad is None
    ]
    if idle:
        raise WorkloadError(
            f"{_listed(idle)} had no part in the loss, so machines would wait for their gradients:"
            " use them, or set their requires_grad to False"
        )
    return {
        "step_s": typical_s(seconds[workers:], waits[workers:]),
        "input_s": fmean(waits[workers:]),
        "losses": losses[:_STEPS],
        "parameters": built.parameters,
        "gradient_bytes": built.gradient_bytes,
        "peak_bytes": peak_bytes(_CPU),
    }


def _notes(
    built: LoadedWorkload, batch: int, figures: dict[str, Any], workload: WorkloadFile
) -> Iterator[str]:
    """Warn of what is probably a mistake."""
    loader = built.loader
    found = {size for part in built.make_batch(batch) for size in sizes(part)}
    if loader is None and batch not in found:
        yield f"make_batch({batch}) returned no tensor with {batch} in its shape"
    held = {id(weights) for group in built.optimizer.param_groups for weights in group["params"]}
    left = [
        name
        for name, weights in built.model.named_parameters()
        if weights.requires_grad and id(weights) not in held
    ]
    if left:
        yield f"the optimizer lacks {_listed(left)}: their gradients are exchanged for nothing"
    share = figures["input_s"] / figures["step_s"]
    if share >= _SLOW_INPUT:
        by = "making a batch" if loader is None else f"waiting for {loader.workers} loader workers"
        yield f"{by} takes {share:.0%} of a step on this processor: input may limit training"
    try:
        try_once(built, 1)
    except Exception as error:
        yield f"a batch of 1 fails, which a slow machine may get: {explain(error, workload)}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


if __name__ == "__main__":
    main()
