"""Rebuild a workload's DataLoader for a new batch size, and control its worker processes.

The rebuilt loader keeps the user's settings, with these exceptions:

- The timeout is at most _MAX_WAIT_S.
- A map-style dataset is sampled at random with replacement, with a different seed on each rank.
- An iterable dataset starts again when it ends.
- An incomplete last batch is dropped.

Some datasets have a sample cache (data_cache.py). Srift times steps as in later epochs, when the
cache is already filled. To fill the cache quickly, the loader draws all batches from a subset of
the samples, for example from 1 % of the dataset. The size limit of the cache is reduced by the same
factor, to 1 % of the user's limit. If the user's cache holds half of the dataset, the reduced cache
therefore holds half of the subset.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Subset

from .processes import die_with_parent

# Maximum seconds to wait for a batch. If a loader hangs, its rank must report this before the other
# ranks' collective times out after Plan.timeout_s.
_MAX_WAIT_S = 45.0
_EXIT_S = 2.0  # seconds that a worker may take to exit after torch has shut it down
_READ_S, _MAX_READ = 1.0, 256  # maximum seconds and samples to read for filling the caches
_MAX_ITEMS = 100  # number of items of a list that are searched for caches
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

    given: the user's DataLoader, which is rebuilt for each new batch size.
    workers: the number of worker processes. 0 means that this process loads the batches.

    The constructor raises LoaderError if `given` overrides `__iter__` or has no `batch_size`.
    """

    def __init__(self, given: DataLoader[Any], *, seed: int) -> None:
        self.given, self.seed = given, seed
        self.workers = given.num_workers
        self._places: list[int] = []  # indices of the samples to draw from; empty means all
        self._iterator: Iterator[Any] | None = None
        self._rebuilt: DataLoader[Any] | None = None
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
        """Return the inputs and the target of the next `batch` samples.

        Raises LoaderError if the data have no complete batch, or if a batch does not have `batch`
        samples. Also raises the errors of torch and of user code.
        """
        if self._rebuilt is None or self._rebuilt.batch_size != batch:
            self.close()
            self._rebuilt = self._rebuild(batch)
        made = None if self._iterator is None else next(self._iterator, None)
        if made is None:  # at the start, and after the last batch of the data
            self._iterator = iter(self._rebuilt)
            made = next(self._iterator, None)
        if made is None:
            raise LoaderError(
                f"the loader's data ended before any worker had a full batch of {batch} samples"
            )
        inputs, target = made
        if batch not in sizes(inputs) & sizes(target):
            raise LoaderError(
                f"the loader returned a batch whose inputs or target do not have {batch} samples"
            )
        return inputs, target

    def as_in_later_epochs(self) -> None:
        """Fill the dataset's sample caches, so that loading is as fast as in later epochs.

        Only a few samples are read. Afterwards, all batches are drawn from these samples. Raises
        the errors of the dataset.
        """
        dataset: Any = self.given.dataset
        caches = list(_caches(dataset))
        if not caches:
            return
        self.close()
        for cached in caches:
            cached.begin_share(1.0)
        order = torch.randperm(
            len(dataset), generator=torch.Generator().manual_seed(self.seed)
        ).tolist()
        until = time.perf_counter() + _READ_S
        self._places = []
        for place in order[:_MAX_READ]:
            dataset[place]
            self._places.append(place)
            if time.perf_counter() > until:
                break
        for cached in caches:
            cached.begin_share(len(self._places) / len(dataset))
        for place in self._places:
            dataset[place]

    @property
    def processes(self) -> list[BaseProcess]:
        return getattr(self._iterator, "_workers", [])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker processes."""
        for process in self.processes:
            with suppress(ProcessLookupError):  # torch reports a dead worker at the next batch
                os.kill(process.pid, number)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the worker processes. The next batch starts new processes."""
        self.signal(signal.SIGCONT)
        # torch would shut down the workers only when Python deletes the iterator
        processes, iterator = self.processes, self._iterator
        self._iterator = self._rebuilt = None
        if processes:
            with worker_deaths_ignored():
                iterator._shutdown_workers()  # type: ignore[union-attr]
        for process in processes:
            process.join(_EXIT_S)
            process.kill()
            process.join()

    def _rebuild(self, batch: int) -> DataLoader[Any]:
        """Return a DataLoader with the user's settings and batch size `batch`.

        Raises LoaderError if a map-style dataset has fewer samples than a batch, and TypeError if
        the dataset has no length.
        """
        given, dataset = self.given, self.given.dataset
        options: dict[str, Any] = {name: getattr(given, name) for name in _KEPT}
        if self.workers:
            options |= {name: getattr(given, name) for name in _KEPT_WITH_WORKERS}
            options["timeout"] = min(self.given.timeout or _MAX_WAIT_S, _MAX_WAIT_S)
            options["worker_init_fn"] = partial(
                _begin_worker, given.worker_init_fn, _folder_of_sockets()
            )
        if not isinstance(dataset, IterableDataset):
            samples = len(dataset)  # type: ignore[arg-type]
            if samples < batch:
                raise LoaderError(
                    f"the dataset of the workload's loader has {samples} samples,"
                    f" fewer than a batch of {batch}"
                )
            if self._places:
                dataset = Subset(dataset, self._places)
            options["sampler"] = RandomSampler(
                dataset,  # type: ignore[arg-type]
                replacement=True,
                num_samples=sys.maxsize,
                generator=torch.Generator().manual_seed(self.seed),
            )
        return DataLoader(dataset, batch_size=batch, drop_last=True, **options)


def _begin_worker(begin: Callable[[int], None] | None, folder: str, worker: int) -> None:
    """Prepare a new loader worker: let the kernel kill it when its rank ends, and call `begin`.

    begin: the user's `worker_init_fn`, or None.
    folder: the folder for the sockets through which the worker returns batches.
    worker: the worker's index, which is passed to `begin`.
    """
    die_with_parent()
    tempfile.tempdir = folder
    if begin is not None:
        begin(worker)


@cache
def _folder_of_sockets() -> str:
    """Return a short path to the temporary folder, in which loader workers create Unix sockets.

    The path of a Unix socket must not exceed 107 characters; see unix(7).
    """
    folder = os.open(tempfile.gettempdir(), os.O_PATH | os.O_DIRECTORY)
    return f"/proc/{os.getpid()}/fd/{folder}"


def _caches(dataset: Any) -> Iterator[Any]:
    """Yield each sample cache (data_cache.py) among a dataset and the datasets that it wraps."""
    seen: set[int] = set()
    left = [dataset]
    while left:
        item = left.pop()
        if id(item) in seen or not hasattr(type(item), "__getitem__"):
            continue
        seen.add(id(item))
        # not isinstance, because a user's copy of data_cache.py defines a different class
        if hasattr(type(item), "begin_share"):
            yield item
        left += getattr(item, "__dict__", {}).values()
        if isinstance(item, list | tuple):
            left += item[:_MAX_ITEMS]


def sizes(data: Any) -> set[int]:
    """Return the sizes of all tensor dimensions, and the lengths of all lists, tuples and mappings.

    If `data` has n samples, n is one of these numbers.

    data: the inputs or the target of a batch.
    """
    if isinstance(data, Tensor):
        return set(data.shape)
    parts = list(data.values()) if isinstance(data, Mapping) else data
    if isinstance(parts, list | tuple):
        return {len(parts)}.union(*map(sizes, parts))
    return set()


@contextmanager
def worker_deaths_ignored() -> Iterator[None]:
    """Return a context manager that disables torch's handler for dead loader workers.

    This handler raises an error when a worker dies, which could hide the first error of the rank.
    """
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


@contextmanager
def running_workers(loader: Loader | None) -> Iterator[None]:
    """Return a context manager that resumes the loader's workers on entry, and pauses them on exit.

    After an exception, the workers keep running. If `loader` is None, nothing is done.
    """
    if loader is not None:
        loader.signal(signal.SIGCONT)
    yield
    if loader is not None:
        loader.signal(signal.SIGSTOP)
