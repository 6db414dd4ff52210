"""What one device tells about a workload: seconds of each part of a step by batch, and when each bucket is ready."""

# No `from __future__ import annotations` here: DDP checks the annotations of a communication hook as objects.

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from . import measuring
from .device import now, peak_bytes, reset_peak
from .entrypoint import LoadedWorkload
from .loader import Cost, Loader
from .measuring import Patience
from .record import Item
from .strategies.tensor import volumes

_BATCH_S, _BUCKETS_S = 1.0, 0.8  # about this long for one batch, and for the buckets
_BURN_IN, _REBUILD, _REPEATS_LEAST, _REPEATS_MOST = 1, 2, 3, 25


def profile(
    item: Item, built: LoadedWorkload, group: dist.ProcessGroup, patience: Patience
) -> tuple[dict[str, Any], str]:
    """Values of a profile record. `group` holds this rank alone: bucket readiness needs DDP, not a network.

    A loader's batches are made in this process, so that their making can be distinguished from what the device does.
    """
    rows: list[dict[str, Any]] = []
    if built.loader is not None:
        built.loader.load_in_process()
        built.loader.as_in_later_epochs()
    for batch in sorted(item.batches):
        try:
            rows.append(patience.undisturbed(partial(_parts, built, batch), None))
        except (
            torch.OutOfMemoryError
        ):  # of a GPU: what is smaller was measured, and says what there is to know
            if not rows:
                raise
            break
    fitted = [int(row["batch"]) for row in rows]
    typical = fitted[len(fitted) // 2]
    loading: dict[str, Any] = {}
    if built.loader is not None:
        loading = _loading(rows, built.loader)
        kept = built.make_batch(
            typical
        )  # what is still to be measured has nothing to do with making others
        smallest = built.make_batch(min(item.batches))
        built = replace(built, make_batch={typical: kept, min(item.batches): smallest}.__getitem__)
    values = {
        "parameters": built.parameters,
        "gradient_bytes": built.gradient_bytes,
        "flops_per_sample": _flops(built, min(item.batches)),
        **_divided(built, min(item.batches)),
        "rows": rows,
        "buckets": _buckets(built, typical, group),
    }
    return values | loading, ""


def _loading(rows: list[dict[str, Any]], loader: Loader) -> dict[str, Any]:
    """`load_s`, `load_wait_s` and `sample_bytes` of one sample, medians over the batches of `rows`, which lose them."""
    costs = [row.pop("costs") for row in rows]
    samples = [(row["batch"], one) for row, own in zip(rows, costs, strict=True) for one in own]
    return {
        "loader_workers": loader.workers,
        "load_s": median(one.processor_s / batch for batch, one in samples),
        "load_wait_s": median(one.waited_s / batch for batch, one in samples),
        "sample_bytes": median(one.read_bytes / batch for batch, one in samples),
    }


def _parts(built: LoadedWorkload, batch: int) -> dict[str, Any]:
    """Forward, backward and optimizer seconds and peak memory of one batch; `input_s` of the forward made the batch.

    The parts are means over the repeats whose sum lies in the middle half, so that they add up to a typical step.
    Making the batch and clearing the gradients count as forward: a measured step (`steps`) pays for them too. With a
    loader there is `costs` too, of making each batch.
    """
    clock_s = partial(now, built.device)
    reset_peak(built.device)
    seconds: list[tuple[float, float, float, float]] = []
    costs: list[Cost] = []
    for _ in _repeats(clock_s, _BURN_IN, _BATCH_S):
        at = [clock_s()]
        built.optimizer.zero_grad(set_to_none=True)
        before = Cost.now()
        inputs, target = built.make_batch(batch)
        costs.append(Cost.now().since(before))
        input_s = clock_s() - at[0]
        with built.arithmetic.forward():
            loss = built.loss(built.model(inputs), target)
        at.append(clock_s())
        built.arithmetic.backward(loss)
        at.append(clock_s())
        built.arithmetic.update(built.optimizer)
        at.append(clock_s())
        seconds.append((at[1] - at[0], at[2] - at[1], at[3] - at[2], input_s))
    steady = seconds[_BURN_IN:]
    middle = [steady[i] for i in measuring.central([sum(one[:3]) for one in steady])]
    forward, backward, optimizer, made = zip(*middle, strict=True)
    costs_of_loader = {} if built.loader is None else {"costs": costs[_BURN_IN:]}
    return costs_of_loader | {
        "batch": batch,
        "forward_s": fmean(forward),
        "backward_s": fmean(backward),
        "optimizer_s": fmean(optimizer),
        "input_s": fmean(made),
        "peak_bytes": peak_bytes(built.device),
        "repeats": len(steady),
    }


def _repeats(clock_s: Callable[[], float], left_out: int, most_s: float) -> Iterator[int]:
    """Counts repeats until `most_s` are spent; the first ones, which are left out, and a few more there always are."""
    started = clock_s()
    for repeat in range(left_out + _REPEATS_MOST):
        if repeat >= left_out + _REPEATS_LEAST and clock_s() - started > most_s:
            return
        yield repeat


def _flops(built: LoadedWorkload, batch: int) -> float:
    """Floating-point operations of forward and backward, for one sample, as torch counts them."""
    inputs, target = built.make_batch(batch)
    with FlopCounterMode(display=False) as counter:
        built.loss(built.model(inputs), target).backward()  # type: ignore[no-untyped-call]
    built.optimizer.zero_grad(set_to_none=True)
    return float(counter.get_total_flops()) / batch


def _divided(built: LoadedWorkload, batch: int) -> dict[str, float]:
    """`volumes` of tensor parallelism: of weights, and for one sample of activations."""
    with torch.no_grad():
        found = volumes(built.model, lambda: built.model(built.make_batch(batch)[0]))
    return {
        name: value / (1 if name == "divided_weights" else batch) for name, value in found.items()
    }


def _buckets(built: LoadedWorkload, batch: int, group: dist.ProcessGroup) -> list[dict[str, float]]:
    """Bytes of each bucket and the fraction of the backward time at which it is ready, in that order.

    DDP rebuilds its buckets after the first pass in the order in which gradients came, so the first two are left out.
    """
    clock_s = partial(now, built.device)
    module = DistributedDataParallel(built.model, process_group=group)
    ready: list[tuple[float, int]] = []

    def note(
        _state: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        ready.append((clock_s(), buffer.numel() * buffer.element_size()))
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    module.register_comm_hook(None, note)
    passes: list[list[tuple[float, int]]] = []
    for _ in _repeats(clock_s, _REBUILD, _BUCKETS_S):
        built.optimizer.zero_grad(set_to_none=True)
        loss = built.loss_of(module, batch)
        ready.clear()
        before = clock_s()
        built.arithmetic.backward(loss)
        backward_s = clock_s() - before
        passes.append([((at - before) / backward_s, size) for at, size in ready])
    steady = passes[_REBUILD:]
    return [
        {"bytes": steady[-1][i][1], "ready_fraction": fmean(one[i][0] for one in steady)}
        for i in range(len(steady[-1]))
    ]
