"""Profile a workload on one device: time each phase of a step and DDP's gradient buckets."""

# DistributedDataParallel compares a hook's annotations with types: no `annotations` import.

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from .device import now, peak_bytes, reset_peak
from .entrypoint import LoadedWorkload
from .record import Item
from .repetition import Patience, central
from .strategies.messages import completed_future
from .strategies.tensor import volumes

_BATCH_S, _BUCKETS_S = 1.0, 0.8  # seconds to spend on each batch size, and on the buckets
_BURN_IN, _REBUILD, _MIN_REPEATS, _MAX_REPEATS = 1, 2, 3, 25

Profile = dict[str, Any]


def profile(
    item: Item, built: LoadedWorkload, group: dist.ProcessGroup, patience: Patience
) -> Profile:
    """Profile the batch sizes of the run `item`, and return the values for its record.

    Profiling ends at the first batch size that does not fit into the device's memory. If no batch
    size fits, the out-of-memory error is raised.

    group: a process group of only this rank, to measure DDP's buckets.
    """
    rows: list[Profile] = []
    if built.loader is not None:
        built.close()
        built.loader.workers = 0  # load in this process, to measure the cost of loading
        built.loader.as_in_later_epochs()
    for batch in item.batches:
        try:
            rows.append(patience.repeat_if_disturbed(partial(_parts, built, batch), None))
        except (RuntimeError, MemoryError) as error:  # smaller batch sizes may be in `rows`
            if not rows or "memory" not in repr(error).lower():
                raise
            break
    typical, smallest = rows[len(rows) // 2]["batch"], item.batches[0]
    loading = [sample for row in rows for sample in row.pop("loading")]
    values: Profile = {}
    if built.loader is not None:
        load_s, load_wait_s = map(median, zip(*loading, strict=True))
        workers = built.loader.given.num_workers
        values = {"load_s": load_s, "load_wait_s": load_wait_s, "loader_workers": workers}
        made = {batch: built.make_batch(batch) for batch in (typical, smallest)}
        built = replace(built, make_batch=made.__getitem__)
    return {
        **built.sizes,
        "flops_per_sample": _flops(built, smallest),
        **volumes(built.model, built.make_batch(smallest)[0], smallest),
        "rows": rows,
        "buckets": _buckets(built, typical, group),
        **values,
    }


def _parts(built: LoadedWorkload, batch: int) -> Profile:
    """Time the phases of a step with `batch` samples, and measure the peak memory.

    The result has these keys:

    forward_s: seconds to clear the gradients, make the batch and run the forward pass.
    backward_s: seconds of the backward pass.
    optimizer_s: seconds of the optimizer's step.
    input_s: seconds to make the batch, which are also part of `forward_s`.
    batch: the number of samples.
    peak_bytes: the peak memory.
    loading: for each repeat of the step, a pair of (CPU seconds, seconds of waiting for storage).
        Both are divided by the number of samples.

    Each of the four times is a mean over the middle half of the repeats, sorted by total time.
    """
    clock_s = partial(now, built.device)
    reset_peak(built.device)
    steps, loading = [], []
    for _ in _repeats(clock_s, _BURN_IN, _BATCH_S):
        started = clock_s()
        built.optimizer.zero_grad()
        before = thread_counters()
        inputs, target = built.make_batch(batch)
        loading.append(_loading_seconds(before, batch))
        loaded = clock_s()
        with built.arithmetic.forward():
            loss = built.loss(built.model(inputs), target)
        forward = clock_s()
        built.arithmetic.backward(loss)
        backward = clock_s()
        built.arithmetic.update(built.optimizer)
        parts = (forward - started, backward - forward, clock_s() - backward, loaded - started)
        steps.append(parts)
    middle = central(steps[_BURN_IN:], lambda step: sum(step[:3]))
    forward_s, backward_s, optimizer_s, input_s = map(fmean, zip(*middle, strict=True))
    return {
        "batch": batch,
        "forward_s": forward_s,
        "backward_s": backward_s,
        "optimizer_s": optimizer_s,
        "input_s": input_s,
        "peak_bytes": peak_bytes(built.device),
        "loading": loading[_BURN_IN:],
    }


def thread_counters() -> list[float]:
    """Return three clocks in seconds: [wall time, CPU time, time in the run queue].

    CPU time and time in the run queue are those of this thread. The time in the run queue is 0 if
    the kernel does not report it (see proc(5)).
    """
    queued_s = 0.0
    with suppress(OSError):
        queued_s = float(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return [time.perf_counter(), time.thread_time(), queued_s]


def _loading_seconds(before: list[float], batch: int) -> tuple[float, float]:
    """Return (CPU seconds, seconds of waiting for storage) per sample of the last batch.

    Call this function immediately after this thread has made the batch.

    before: the clocks (see thread_counters) just before this thread made the batch.
    batch: the number of samples in the batch.
    """
    wall_s, processor_s, queued_s = (
        (now - then) / batch for now, then in zip(thread_counters(), before, strict=True)
    )
    return processor_s, max(0.0, wall_s - processor_s - queued_s)


def _repeats(clock_s: Callable[[], float], left_out: int, max_s: float) -> Iterator[int]:
    """Yield the indices 0, 1, 2, ... of a measurement's repeats.

    The first `left_out` repeats are a warm-up. At least _MIN_REPEATS and at most _MAX_REPEATS
    repeats follow. After _MIN_REPEATS, no repeat starts more than `max_s` seconds after the first
    repeat of the warm-up.

    clock_s: a function that waits for the device and returns the current time in seconds.
    """
    started = clock_s()
    for repeat in range(left_out + _MAX_REPEATS):
        if repeat >= left_out + _MIN_REPEATS and clock_s() - started > max_s:
            return
        yield repeat


def _flops(built: LoadedWorkload, batch: int) -> float:
    """Return the FLOPs per sample of a forward and backward pass, counted by FlopCounterMode."""
    inputs, target = built.make_batch(batch)
    with FlopCounterMode(display=False) as counter:
        built.loss(built.model(inputs), target).backward()  # type: ignore[no-untyped-call]
    built.optimizer.zero_grad()
    return float(counter.get_total_flops()) / batch


def _buckets(built: LoadedWorkload, batch: int, group: dist.ProcessGroup) -> list[dict[str, float]]:
    """Measure when DDP's gradient buckets are ready for communication during the backward pass.

    Returns a dictionary for each bucket, in the order in which buckets become ready:

    bytes: the size of the bucket.
    ready_fraction: the time from the start of the backward pass until the bucket is ready, divided
        by the time of the whole backward pass.
    """
    clock_s = partial(now, built.device)
    module = DistributedDataParallel(built.model, process_group=group)
    ready: list[tuple[float, int]] = []

    def note(
        _state: None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> Future[torch.Tensor]:
        ready.append((clock_s(), bucket.buffer().nbytes))
        return completed_future(bucket.buffer())

    module.register_comm_hook(None, note)
    passes = []
    # DDP rebuilds its buckets after the first pass, so the first _REBUILD passes are left out.
    for _ in _repeats(clock_s, _REBUILD, _BUCKETS_S):
        built.optimizer.zero_grad()
        loss = built.loss_of(module, batch)
        ready.clear()
        before = clock_s()
        built.arithmetic.backward(loss)
        backward_s = clock_s() - before
        passes.append([((at - before) / backward_s, size) for at, size in ready])
    return [
        {"bytes": bucket[-1][1], "ready_fraction": fmean(fraction for fraction, _ in bucket)}
        for bucket in zip(*passes[_REBUILD:], strict=True)
    ]
