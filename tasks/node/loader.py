"""A workload's own DataLoader: rebuilt for the samples that a device is to see, watched, and ended.

Everything stays as its user set it but the samples of a batch, a long timeout and, of a dataset with indices, their
order: drawn by a seed, others on each rank. Data that end begin again; samples that fill no batch are left out.

Steps of a first epoch, in which a cache is filled (data_cache.py), are not those of later ones, which a training has
more of. A few steps of a large dataset would be the first epoch's, of a small one's some of both. So what is timed is
a later epoch's: a few samples are read beforehand, of caches with room for as large a share of them as of all.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from .processes import die_with_parent

# Most seconds of a batch, whatever timeout the user set: workers that hang must not hang a launch, and the rank whose
# loader is late says so before a collective of the others ends (Plan.timeout_s), who would tell of a lost peer.
_WITHIN_S = 45.0
_LEAVE_S = 2.0  # what workers have to end in, once torch has ended them
_MOST_PATH = 70  # characters of a folder in which workers can have a socket, whose path has 107 at most [unix(7)]
_TRACEBACK = "Original Traceback"  # torch's words before what a worker's error said
_ENDLESS = 2**62  # samples: no pass over the data ends within a measurement
_READ_S, _READ_MOST = 1.0, 256  # of samples that are read beforehand, each of two times
_MOST_PARTS, _MOST_LOOKED_INTO = (
    1000,
    100_000,
)  # of one list, and in all: where a million labels lie is no cache
_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "worker_init_fn",
    "generator",
    "persistent_workers",
    "in_order",
)
_OF_WORKERS = ("timeout", "prefetch_factor", "multiprocessing_context")


class LoaderError(Exception):
    """The loader does not give what was asked of it; `codes` are where in the user's own files that may lie."""

    def __init__(self, message: str, codes: tuple[CodeType, ...] = ()) -> None:
        super().__init__(message)
        self.codes = codes


@dataclass(frozen=True, slots=True)
class _Begin:
    """The user's `worker_init_fn`, in a worker that ends with its rank, however that ends.

    `folder`: where its sockets are made, by which it hands its batches over.
    """

    own: Callable[[int], None] | None
    folder: str

    def __call__(self, worker: int) -> None:
        die_with_parent()
        tempfile.tempdir = self.folder
        if self.own is not None:
            self.own(worker)


@cache
def _short(folder: str) -> str:
    """The folder by a name that is no longer than a socket's may be, for this process and those that it starts."""
    if len(os.fsencode(folder)) <= _MOST_PATH:
        return folder
    return f"/proc/{os.getpid()}/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY)}"


class Loader:
    """Batches of a rank: `loader(batch)` waits for the next one of so many samples.

    `workers` is the number of processes that the user asked for.
    """

    def __init__(
        self, given: DataLoader[Any], *, seed: int, made_in: CodeType | None = None
    ) -> None:
        """`made_in`: the user's function that returned it.

        Raises LoaderError where the samples of its batches cannot be set.
        """
        self.given, self.seed, self.made_in = given, seed, made_in
        self.workers = given.num_workers
        self.in_process = False
        self._among: Sequence[int] = ()  # samples that batches are made of; empty: all
        self._batch = 0
        self._iterator: Iterator[Any] | None = None
        self._rebuilt: DataLoader[Any] | None = None
        self._processes: list[BaseProcess] = []
        if type(given).__iter__ is not DataLoader.__iter__:
            raise LoaderError(
                f"its loader, {type(given).__name__}, has an __iter__ of its own, whose batches Srift cannot set:"
                " return a torch.utils.data.DataLoader",
                self._codes(),
            )
        if given.batch_size is None:
            raise LoaderError(
                "its loader has no batch_size, so that Srift cannot set the samples of a batch: give its DataLoader a"
                " batch_size, and a dataset of single samples",
                self._codes(),
            )

    def __call__(self, batch: int) -> tuple[Any, Any]:
        """(inputs, target) of `batch` samples.

        Raises LoaderError where they do not come, or are something else; and what the user's code raises in this
        process.
        """
        if self._iterator is None or self._batch != batch:
            self.close()
            self._batch, self._rebuilt = batch, self._rebuild(batch)
            self._begin()
        try:
            made = next(self._iterator)  # type: ignore[arg-type]
        except StopIteration:
            self._begin()
            made = self._first(batch)
        except Exception as error:
            raise self._said(error) from error
        return self._checked(made, batch)

    def load_in_process(self) -> None:
        """From now on the rank loads by itself, whatever its user asked for."""
        self.close()
        self.in_process = True

    def as_in_later_epochs(self) -> None:
        """From now on a dataset with a cache gives what it gives once it has read everything; others stay as they are.

        Raises what the user's code raises.
        """
        dataset = self.given.dataset
        caches = [] if isinstance(dataset, IterableDataset) else list(_caches(dataset))
        samples = len(dataset) if caches else 0  # type: ignore[arg-type]
        if not samples:
            return
        self.close()
        for one in caches:
            one.begin_part(1.0)
        order = torch.randperm(samples, generator=torch.Generator().manual_seed(self.seed))
        until, read = time.perf_counter() + _READ_S, 0
        for place in order[:_READ_MOST].tolist():
            dataset[place]
            read += 1
            if time.perf_counter() > until:
                break
        self._among = order[:read].tolist()
        for one in caches:
            one.begin_part(read / samples)
        for place in self._among:
            dataset[place]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the workers; those that have ended get none, torch says so at the next batch."""
        for one in self._processes:
            with suppress(ProcessLookupError, TypeError):
                os.kill(one.pid, number)  # type: ignore[arg-type]

    def close(self) -> None:
        """End the workers; the next batch is the first of a new start."""
        self.signal(signal.SIGCONT)
        with worker_deaths_ignored():
            iterator, processes = self._iterator, self._processes
            self._iterator, self._rebuilt, self._processes = None, None, []
            end = getattr(
                iterator, "_shutdown_workers", None
            )  # what torch does once nobody holds the iterator any more
            if end is not None:
                end()
        for one in processes:
            one.join(_LEAVE_S)
            if one.is_alive():
                one.kill()
                one.join()

    def _rebuild(self, batch: int) -> DataLoader[Any]:
        given, dataset = self.given, self.given.dataset
        asked: dict[str, Any] = {name: getattr(given, name) for name in _KEPT}
        asked["worker_init_fn"] = _Begin(given.worker_init_fn, _short(tempfile.gettempdir()))
        if self.in_process or not self.workers:
            asked |= {"num_workers": 0, "persistent_workers": False}
        else:
            asked |= {name: getattr(given, name) for name in _OF_WORKERS}
            asked["timeout"] = self._within_s
        if not isinstance(dataset, IterableDataset):
            order = torch.Generator().manual_seed(self.seed)
            try:
                samples = len(dataset)  # type: ignore[arg-type]
            except TypeError:
                raise LoaderError(
                    "the dataset of its loader has no __len__", self._codes()
                ) from None
            if samples < batch:
                has = (
                    f"has {samples} samples, fewer than a batch of {batch}"
                    if samples
                    else "is empty"
                )
                raise LoaderError(f"the dataset of its loader {has}", self._codes())
            asked["sampler"] = RandomSampler(
                range(samples), replacement=True, num_samples=_ENDLESS, generator=order
            )
            if self._among:
                asked["sampler"] = _Among(self._among, order)
        return DataLoader(dataset, batch_size=batch, drop_last=True, **asked)

    def _begin(self) -> None:
        before = set(multiprocessing.active_children())
        try:
            self._iterator = iter(self._rebuilt)  # type: ignore[arg-type]
        except Exception as error:
            raise self._said(error) from error
        self._processes = [
            one for one in self._processes if one.is_alive()
        ]  # persistent ones go on
        self._processes += set(multiprocessing.active_children()) - before

    def _first(self, batch: int) -> Any:
        """Of a new start, which must have one."""
        try:
            return next(self._iterator)  # type: ignore[arg-type]
        except StopIteration:
            beside = (
                f" from any of its {self.workers} workers"
                if self.workers > 1 and not self.in_process
                else ""
            )
            raise LoaderError(
                f"its loader ends before it gave {batch} samples{beside}", self._codes()
            ) from None
        except Exception as error:
            raise self._said(error) from error

    def _checked(self, made: Any, batch: int) -> tuple[Any, Any]:
        if not isinstance(made, tuple | list) or len(made) != 2:
            what = f"{len(made)} parts" if isinstance(made, tuple | list) else type(made).__name__
            raise LoaderError(
                f"its loader gave {what} as a batch, where a pair (inputs, target) is due",
                self._codes(),
            )
        for name, part in zip(("inputs", "target"), made, strict=True):
            sizes = list(_sizes(part))
            if batch not in sizes:
                first = f"; they have {sizes[0]}" if sizes else ""
                raise LoaderError(
                    f"the {name} that its loader gave are not of {batch} samples{first}",
                    self._codes(),
                )
        return made[0], made[1]

    def _said(self, error: Exception) -> BaseException:
        if (
            isinstance(error, OSError | EOFError)
            and self._processes
            and _TRACEBACK not in str(error)
        ):
            # a worker that dies while it hands over a batch resets the connection, before torch hears of its death
            ending = wait([one.sentinel for one in self._processes], timeout=_LEAVE_S)
            for one in self._processes:
                if one.sentinel in ending:
                    one.join(_LEAVE_S)  # its pipe is closed a moment before it has an exit code
                    return LoaderError(
                        f"a worker of its loader died: exit code {one.exitcode}", self._codes()
                    )
        return in_words(error, self._codes(), within_s=self._within_s)

    @property
    def _within_s(self) -> float:
        return min(self.given.timeout or _WITHIN_S, _WITHIN_S)

    def _codes(self) -> tuple[CodeType, ...]:
        """The functions that make a batch, and the one that made the loader: some of them are the user's."""
        kind = type(self.given.dataset)
        made = [getattr(kind, name, None) for name in ("__iter__", "__getitem__", "__getitems__")]
        codes = [getattr(one, "__code__", None) for one in (*made, self.given.collate_fn)]
        return tuple(one for one in (*codes, self.made_in) if one is not None)


class _Among(Sampler[int]):
    """Some samples, drawn again and again."""

    def __init__(self, places: Sequence[int], order: torch.Generator) -> None:
        self.places, self.order = places, order

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self.places[int(torch.randint(len(self.places), (1,), generator=self.order))]


def _caches(dataset: Any) -> Iterator[Any]:
    """The caches in a dataset, and in all with a __getitem__ that it is made of, what is nearest first.

    Users have copies of data_cache.py: no type tells.
    """
    seen: set[int] = set()
    left: deque[Any] = deque([dataset])
    while left and len(seen) < _MOST_LOOKED_INTO:
        one = left.popleft()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if hasattr(type(one), "begin_part"):
            yield one
        held = list(getattr(one, "__dict__", {}).values())
        if isinstance(one, list | tuple | dict):
            held += islice(one.values() if isinstance(one, dict) else one, _MOST_PARTS)
        left += [
            part
            for part in held
            if hasattr(type(part), "__getitem__") and not isinstance(part, str | bytes | Tensor)
        ]


def in_words(
    error: BaseException, codes: tuple[CodeType, ...] = (), *, within_s: float = _WITHIN_S
) -> BaseException:
    """A LoaderError for what torch says of its workers, who may die at any moment of a step; any other as it is."""
    if isinstance(error, LoaderError):
        return error
    lines = str(error).strip().splitlines() or [""]
    if _TRACEBACK in str(error):
        return LoaderError(f"in a worker of its loader: {lines[-1]}\n{error}", codes)
    if "DataLoader timed out" in lines[0]:
        return LoaderError(f"its loader gave no batch within {within_s:.0f} s", codes)
    if "DataLoader worker" in lines[0]:
        return LoaderError(f"a worker of its loader died: {lines[0]}", codes)
    return error


@contextmanager
def worker_deaths_ignored() -> Iterator[None]:
    """Inside, no signal of torch's raises that a worker has died: it would hide an error that is being reported."""
    if (
        threading.current_thread() is not threading.main_thread()
    ):  # signals are the main thread's alone
        yield
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)


@contextmanager
def running(loader: Loader | None) -> Iterator[None]:
    """Workers run inside, and stand still from then on: what is done beside the steps is neither disturbed by them, nor
    time for them to load in.
    """
    if loader is None:
        yield
        return
    loader.signal(signal.SIGCONT)
    yield
    loader.signal(signal.SIGSTOP)


def _sizes(part: Any) -> Iterator[int]:
    """Every size of the tensors in a part of a batch, and the lengths of its lists."""
    if isinstance(part, Tensor):
        yield from part.shape
    elif isinstance(part, Mapping):
        for one in part.values():
            yield from _sizes(one)
    elif isinstance(part, list | tuple):
        yield len(part)
        for one in part:
            yield from _sizes(one)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What this thread spent so far: seconds, those of a processor, those of waiting for one; bytes asked for by reads,
    and bytes that storage was read for. What the kernel does not tell stays 0.
    """

    wall_s: float
    processor_s: float
    queued_s: float
    asked_bytes: float
    stored_bytes: float

    @classmethod
    def now(cls) -> Cost:
        """Since the thread began."""
        queued_s, counters = 0.0, {"rchar": 0.0, "read_bytes": 0.0}  # proc(5)
        with suppress(OSError, ValueError, IndexError):
            queued_s = float(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
        with suppress(OSError, ValueError):
            lines = Path("/proc/thread-self/io").read_text().splitlines()
            counters |= {
                name: float(value) for name, _, value in (line.partition(":") for line in lines)
            }
        return cls(
            wall_s=time.perf_counter(),
            processor_s=time.thread_time(),
            queued_s=queued_s,
            asked_bytes=counters["rchar"],
            stored_bytes=counters["read_bytes"],
        )

    def since(self, before: Cost) -> Cost:
        """From then on."""
        return Cost(
            **{name: getattr(self, name) - getattr(before, name) for name in self.__slots__}
        )

    @property
    def waited_s(self) -> float:
        """Seconds in which it neither ran nor could have: of storage, or the network."""
        return max(0.0, self.wall_s - self.processor_s - self.queued_s)

    @property
    def read_bytes(self) -> float:
        """Bytes of files: mapped ones are read without being asked for, what lies in memory is asked for alone."""
        return max(self.asked_bytes, self.stored_bytes)
