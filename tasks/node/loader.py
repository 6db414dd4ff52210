"""Rebuild a workload's DataLoader for a batch size, watch its workers, and end them.

The rebuilt loader keeps the user's settings, with three exceptions. The batch size is set. The
timeout is at most _MAX_WAIT_S. If the dataset has indices, samples are drawn at random, with a seed
that differs on each rank. When the data end, the loader starts again. An incomplete last batch is
dropped.

In most epochs of a training, the cache (data_cache.py) is full, so steps are timed as in later
epochs. To fill the caches quickly, a few samples are read before the first step, and batches are
drawn from these samples only. The caches are made smaller in proportion. They then hold the same
fraction of these samples as they would hold of the whole dataset.
"""

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler

from .processes import die_with_parent

# Maximum seconds to wait for a batch. It is shorter than Plan.timeout_s, so that the rank with the
# hanging loader reports the problem before the collective of the other ranks times out.
_MAX_WAIT_S = 45.0
_EXIT_S = 2.0  # seconds that a worker may take to exit after torch has shut it down
_READ_S, _MAX_READ = 1.0, 256  # seconds and samples: limits of what is read to fill the caches
_MAX_ITEMS = 100  # of a list in which caches are searched
_KEPT = ("collate_fn", "pin_memory", "generator", "in_order")
_KEPT_WITH_WORKERS = (
    "num_workers",
    "persistent_workers",
    "prefetch_factor",
    "multiprocessing_context",
)


class LoaderError(Exception):
    """The loader returns no batch or a wrong batch, or it cannot be rebuilt."""


class Loader:
    """The source of a rank's batches: `loader(batch)` returns the next batch of `batch` samples.

    `workers` is the user's number of worker processes. If `in_process` is True, this process loads
    the batches itself. The constructor raises LoaderError if the DataLoader `given` overrides
    `__iter__` or has no `batch_size`, because its batch size can then not be changed.
    """

    def __init__(self, given: DataLoader[Any], *, seed: int) -> None:
        self.given, self.seed = given, seed
        self.workers = given.num_workers
        self.in_process = False
        self._places: Sequence[int] = ()  # indices of the samples to draw from; empty means all
        self._batch = 0
        self._iterator: Iterator[Any] | None = None
        self._rebuilt: DataLoader[Any] | None = None
        self._processes: list[BaseProcess] = []
        if type(given).__iter__ is not DataLoader.__iter__:
            raise LoaderError(
                f"the workload's loader {type(given).__name__} overrides __iter__."
                " Return a torch.utils.data.DataLoader"
            )
        if given.batch_size is None:
            raise LoaderError(
                "the workload's loader has no batch_size. Give its DataLoader a batch_size"
            )

    def __call__(self, batch: int) -> tuple[Any, Any]:
        """Return the inputs and the target of `batch` samples.

        Raises LoaderError if no such batch arrives, and the errors of torch and of user code.
        """
        if self._rebuilt is None or self._batch != batch:
            self.close()
            self._batch, self._rebuilt = batch, self._rebuild(batch)
        made = None if self._iterator is None else next(self._iterator, None)
        if made is None:  # at the start, and after the last batch of the data
            self._start()
            made = next(self._iterator, None)  # type: ignore[arg-type]
        if made is None:
            raise LoaderError(f"the workload's loader ended before a worker had {batch} samples")
        inputs, target = made
        if batch not in sizes(inputs) & sizes(target):
            raise LoaderError(
                f"inputs or target of the workload's loader do not have {batch} samples"
            )
        return inputs, target

    def as_in_later_epochs(self) -> None:
        """Fill the dataset's caches. Batches then take as long as in later epochs.

        Does nothing if the dataset has no cache. Raises the errors of the dataset.
        """
        dataset: Any = self.given.dataset
        caches = list(_caches(dataset))
        if not caches:
            return
        self.close()
        for cached in caches:
            cached.begin_part(1.0)
        order = torch.randperm(len(dataset), generator=self._generator()).tolist()
        until = time.perf_counter() + _READ_S
        for read, place in enumerate(order[:_MAX_READ], 1):
            dataset[place]
            self._places = order[:read]
            if time.perf_counter() > until:
                break
        for cached in caches:
            cached.begin_part(len(self._places) / len(dataset))
        for place in self._places:
            dataset[place]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the workers. torch reports dead workers at the next batch."""
        for process in self._processes:
            with suppress(ProcessLookupError, TypeError):
                os.kill(process.pid, number)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the workers. The next batch starts new workers."""
        self.signal(signal.SIGCONT)
        # torch shuts the workers down only when the iterator is deleted
        shut_down = getattr(self._iterator, "_shutdown_workers", None)
        processes = self._processes
        self._iterator, self._rebuilt, self._processes = None, None, []
        with worker_deaths_ignored():
            if shut_down is not None:
                shut_down()
        for process in processes:
            process.join(_EXIT_S)
            process.kill()
            process.join()

    def _rebuild(self, batch: int) -> DataLoader[Any]:
        """Return a DataLoader with the user's settings for `batch` samples.

        Raises LoaderError if the dataset has no length or fewer samples than a batch.
        """
        given, dataset = self.given, self.given.dataset
        options: dict[str, Any] = {name: getattr(given, name) for name in _KEPT}
        if self.workers and not self.in_process:
            options |= {name: getattr(given, name) for name in _KEPT_WITH_WORKERS}
            options["timeout"] = min(self.given.timeout or _MAX_WAIT_S, _MAX_WAIT_S)
            begin = partial(_begin_worker, given.worker_init_fn, _folder_of_sockets())
            options["worker_init_fn"] = begin
        if not isinstance(dataset, IterableDataset):
            samples = len(dataset)  # type: ignore[arg-type]
            if samples < batch:
                few = f"has {samples} samples, fewer than a batch of {batch}"
                raise LoaderError(f"the dataset of the workload's loader {few}")
            options["sampler"] = _Draws(self._places or range(samples), self._generator())
        return DataLoader(dataset, batch_size=batch, drop_last=True, **options)

    def _start(self) -> None:
        """Start to iterate, and collect the worker processes."""
        before = set(multiprocessing.active_children())
        self._iterator = iter(self._rebuilt)  # type: ignore[arg-type]
        persistent = [process for process in self._processes if process.is_alive()]
        self._processes = [*persistent, *(set(multiprocessing.active_children()) - before)]

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


class _Draws(Sampler[int]):
    """A sampler that draws dataset indices from `places`, endlessly and with replacement."""

    def __init__(self, places: Sequence[int], generator: torch.Generator) -> None:
        self.places, self.generator = places, generator

    def __iter__(self) -> Iterator[int]:
        while True:
            drawn = torch.randint(len(self.places), (1,), generator=self.generator)
            yield self.places[int(drawn)]


def _begin_worker(begin: Callable[[int], None] | None, folder: str, worker: int) -> None:
    """Set up a loader worker, and run the user's `worker_init_fn` in it.

    The worker ends when its rank ends. It returns batches through sockets in `folder`.
    """
    die_with_parent()
    tempfile.tempdir = folder
    if begin is not None:
        begin(worker)


@cache
def _folder_of_sockets() -> str:
    """Return a short path to the temporary folder.

    The paths of sockets in it then have at most 107 characters, which is the limit [unix(7)].
    """
    folder = os.open(tempfile.gettempdir(), os.O_PATH | os.O_DIRECTORY)
    return f"/proc/{os.getpid()}/fd/{folder}"


def _caches(dataset: Any) -> Iterator[Any]:
    """Yield the sample caches that a dataset contains.

    The attributes of the dataset and the first items of lists are searched. A cache is recognised
    by its method `begin_part`, because a user's copy of data_cache.py defines another class.
    """
    seen: set[int] = set()
    left = [dataset]
    while left:
        item = left.pop()
        if id(item) in seen or not hasattr(type(item), "__getitem__"):
            continue
        seen.add(id(item))
        if hasattr(type(item), "begin_part"):
            yield item
        left += getattr(item, "__dict__", {}).values()
        if isinstance(item, list | tuple):
            left += item[:_MAX_ITEMS]


def sizes(data: Any) -> set[int]:
    """Return the size of each dimension of each tensor in `data`, and the length of each list.

    `data` are the inputs or the target of a batch.
    """
    if isinstance(data, Tensor):
        return set(data.shape)
    parts = list(data.values()) if isinstance(data, Mapping) else data
    if isinstance(parts, list | tuple):
        return {len(parts)}.union(*map(sizes, parts))
    return set()


@contextmanager
def worker_deaths_ignored() -> Iterator[None]:
    """Disable torch's handler of dead loader workers during the block.

    The handler could raise an error and thereby hide the error that is being reported.
    """
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


@contextmanager
def running(loader: Loader | None) -> Iterator[None]:
    """Let the loader's workers run during the block, and pause them after it.

    Workers then load batches only while steps are measured.
    """
    if loader is not None:
        loader.signal(signal.SIGCONT)
    yield
    if loader is not None:
        loader.signal(signal.SIGSTOP)
