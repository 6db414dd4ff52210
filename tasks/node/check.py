"""Two steps of a workload on this machine's processor, before any machine is bought: what is wrong,
and what it takes.

`python -m node.check ANSWER` reads a question from standard input and writes the answer to the file
ANSWER, both JSON: the workload as a plan has it, the `folder` that its code lies in, `precisions`
and the `batch` of one device; in `precisions` what `checked` says of each, in `files` those of its
code that were imported, by the names that they travel under.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from .data import S3, DataMissing
from .device import now, peak_bytes, reset_peak
from .entrypoint import LoadedWorkload, WorkloadError, build, own_name, try_once
from .launch import explain
from .precision import NoSuchPrecision, arithmetic
from .processes import die_with_parent
from .record import WorkloadFile
from .steps import Timed, one_step

_STEPS = 2
_NAMED = 3  # parameters in a message
_SLOW_INPUT = 0.1  # of a step
_CPU = torch.device("cpu")
# How torch, with and without CUDA in it, says that there is no GPU; and how it and Python say that
# files are missing.
_NO_GPU = re.compile(
    "Torch not compiled with CUDA enabled|No CUDA GPUs are available|Found no NVIDIA driver"
)
_NO_DATA = re.compile("No such file or directory|num_samples=0|its loader is empty")
_FEW_SAMPLES = re.compile("fewer than a batch of")


def main() -> None:
    """Answer one question. Exits 0 whatever is wrong with the workload."""
    die_with_parent()
    question = json.load(sys.stdin)
    workload = WorkloadFile(**question["workload"])
    folder, batch = Path(question["folder"]), question["batch"]
    answers = [checked(folder, workload, one, batch=batch) for one in question["precisions"]]
    imported = (getattr(one, "__file__", None) or "" for one in list(sys.modules.values()))
    files = sorted({own_name(str(file), workload) for file in imported} - {""})
    Path(sys.argv[1]).write_text(json.dumps({"precisions": answers, "files": files}))


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
            advice = _advice(error, workload)
            answer["problem"] = explain(error, workload) + (f"; {advice}" if advice else "")
    finally:
        if built is not None:
            built.close()
    return answer


def _advice(error: BaseException, workload: WorkloadFile) -> str:
    """What to do about an error whose words do not say it; empty if unknown."""
    text, section = f"{type(error).__name__}: {error}", f"under [workloads.{workload.name}]"
    if isinstance(error, ModuleNotFoundError):
        return "name what is imported beside torch and Python's library in `requirements`"
    if _NO_GPU.search(text):
        return (
            'leave out `.cuda()`, `.to("cuda")` and `device="cuda"`: Srift moves model, loss and'
            " batches to each machine's device"
        )
    if _NO_DATA.search(text) and not workload.data:
        return f'files do not travel: state `data = "FOLDER"` {section}, and read them below `data`'
    if (
        isinstance(error, KeyError)
        and error.args[0] not in os.environ
        and _reads_environment(error)
    ):
        return f'variables do not travel: state `env = {{ {error.args[0]} = "..." }}` {section}'
    if _FEW_SAMPLES.search(text):
        return f"a check tries a quarter of `global_batch`: lower it {section}"
    return ""


def _reads_environment(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code is type(os.environ).__getitem__.__code__


def _trained(built: LoadedWorkload, batch: int) -> dict[str, Any]:
    """Return figures of a few steps. Raises WorkloadError if no machine could train it
    with others.
    """
    try_once(built, batch)
    if built.loader is not None:
        built.loader.as_in_later_epochs()
    losses, seconds, waits = [], [], []
    workers = (
        0 if built.loader is None else built.loader.workers
    )  # each begins with a batch that nobody waited for
    for _ in range(max(_STEPS, workers) + workers):
        started, waited = now(_CPU), built.waits.seconds
        losses.append(
            one_step(built, built.model, batch=batch, accumulation_steps=1, scale=1.0, sync=True)
        )
        seconds.append(now(_CPU) - started)
        waits.append(built.waits.seconds - waited)
    if not all(math.isfinite(one) for one in losses):
        raise WorkloadError(
            f"the loss is {losses[0]}, then {losses[-1]}: not a number to train with"
        )
    trained = [(name, one) for name, one in built.model.named_parameters() if one.requires_grad]
    idle = [name for name, one in trained if one.grad is None]
    if idle:
        raise WorkloadError(
            f"{_listed(idle)} had no part in the loss, so machines would wait for their gradients:"
            " use them, or set their requires_grad to False"
        )
    timed = Timed(0.0, seconds[workers:], waits[workers:])
    input_s = fmean(timed.input_s)
    sizes = {
        "parameters": built.parameters,
        "gradient_bytes": built.gradient_bytes,
        "peak_bytes": peak_bytes(_CPU),
    }
    return {
        "step_s": median(timed.own_s) + input_s,
        "input_s": input_s,
        "losses": losses[:_STEPS],
    } | sizes


def _notes(
    built: LoadedWorkload, batch: int, figures: dict[str, Any], workload: WorkloadFile
) -> Iterator[str]:
    """Warn of what is rarely meant."""
    loader = built.loader
    sizes = {size for one in _tensors(built.make_batch(batch)) for size in one.shape}
    if batch not in sizes and loader is None:
        yield f"make_batch({batch}) returned no tensor with {batch} in its shape"
    held = {id(one) for group in built.optimizer.param_groups for one in group["params"]}
    trained = ((name, one) for name, one in built.model.named_parameters() if one.requires_grad)
    left = [name for name, one in trained if id(one) not in held]
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


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, Mapping | list | tuple):
        for one in part.values() if isinstance(part, Mapping) else part:
            yield from _tensors(one)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


if __name__ == "__main__":
    main()
