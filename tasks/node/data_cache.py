"""Samples of a dataset, read and decoded once: kept in memory, and on a local disk for other ranks and later runs.

To be copied beside a script that trains: it needs Linux and torch, and nothing else of Srift.

A level is one file that all processes of a machine which have it share: of no name, in memory, or in a folder.

    head     magic, digest, number of samples
    state    where what is taken ends; 1 once no more is taken
    index    of each sample: where it begins, its bytes, their checksum; zeros where it is not kept
    samples  pickles, one after another

Under a lock a process takes room, writes a sample there, and its place in the index last. What is half written is in no
index, and what a machine that lost its power left there fits no checksum: such a sample is read from the dataset anew.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import io
import logging
import operator
import os
import pickle
import struct
import sys
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

_GIB = 2**30
_LEAST_FREE = 5 * _GIB  # of a disk, for checkpoints and all else that a training writes
_READ_TWICE = (
    3  # samples that each process reads again before it trusts that they are always the same
)
_LOCKED_WITHIN_S = 2.0  # a process may be stopped, or a file server gone, while it has the lock
_MOST_STALLS = (
    3  # samples in a row that a process waits for the lock in vain, before it keeps no more
)
_MAGIC = b"srift-1\n"
_HEAD, _STATE, _ENTRY = struct.Struct("<8s32sQ"), struct.Struct("<QQ"), struct.Struct("<QQQ")
_INDEX = _HEAD.size + _STATE.size
_LOG = logging.getLogger(__name__)


class Samples(Protocol):
    """A dataset of samples that have numbers, as torch's map-style datasets are."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> Any: ...


class Cached(Dataset[Any]):
    """The samples of `dataset`, each read from it once; the same ones, in whatever order they are asked for.

    What the dataset draws at random would be the same in every epoch. So wrap the dataset that reads and decodes, and
    augment outside of the cache; the first samples are read twice, and refused where they differ:

        loader = DataLoader(Augmented(Cached(Photos(folder), memory_gib=8), RandomCrop(224)), shuffle=True)

    `memory_gib` of memory hold what comes first. They are the loader's workers' together, of one process: ranks on one
    machine have each their own. `folder`, best on a local disk, holds all samples, for all processes of this user on
    the machine and for later runs; while less than 5 GiB are free there, no more are written. What neither takes is
    read from the dataset in every epoch, and one warning says so. Memory that a file in `folder` takes beside is the
    kernel's page cache, which gives way to other needs.

    A file is for one dataset: its type and attributes, as pickle has them, and the text of the modules that they are
    from, of which a notebook has none. Files that it reads are not looked at. `key` stands in place of all but the
    name of the type: it names one dataset, and is to be changed whenever samples change. Two of a type that differ by
    their arguments need two keys; with one they would be given each other's samples.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        memory_gib: float = 1.0,
        folder: str | os.PathLike[str] | None = None,
        key: str = "",
    ) -> None:
        """Raises TypeError for a dataset without numbered samples, ValueError where nothing would be kept, or where
        nothing tells what is in `folder` from another dataset's.
        """
        name = type(dataset).__name__
        if isinstance(dataset, IterableDataset):
            raise TypeError(
                f"{name} is an IterableDataset, whose samples have no numbers to find them by: only datasets with"
                " __getitem__ and __len__ can be cached"
            )
        for method in ("__getitem__", "__len__"):
            if not hasattr(type(dataset), method):
                raise TypeError(
                    f"{name} has no {method}: only datasets with numbered samples can be cached"
                )
        if memory_gib < 0 or (memory_gib == 0 and folder is None):
            raise ValueError(f"a cache of {memory_gib:g} GiB of memory and no folder keeps nothing")
        self.dataset, self.memory_gib, self.folder = dataset, memory_gib, folder
        self._samples = len(dataset)
        self._to_read_twice = _READ_TWICE
        digest = os.urandom(32) if folder is None else _digest(dataset, self._samples, key)
        self._head = _HEAD.pack(_MAGIC, digest, self._samples)
        self._levels = [self._in_memory(memory_gib * _GIB)] if memory_gib else []
        if folder is not None:
            path = Path(folder, f"srift-{digest.hex()[:24]}.cache")
            with _or_without(folder):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._levels.append(
                    _Level(_open(path, self._head), self._head, path=str(path), told=f"in {path}")
                )

    def __len__(self) -> int:
        """How many samples the dataset had when it was wrapped."""
        return self._samples

    def __getitem__(self, place: int) -> Any:
        """One sample, a copy of its own. Raises IndexError, ValueError for one that cannot be kept or is not the same
        when it is read again, and what the dataset raises.
        """
        at = operator.index(place)
        at += self._samples if at < 0 else 0
        if not 0 <= at < self._samples:
            raise IndexError(f"no sample {place} of {self._samples}")
        before: list[tuple[_Level, bytes | None, bytes]] = []
        for level in self._levels:
            content, entry = level.get(at)
            if content is not None:
                with suppress(Exception):  # kept by other versions of what it is made of: read anew
                    sample = pickle.loads(content)
                    for faster, _, old in before:
                        faster.put(at, content, old)
                    return sample
            before.append((level, content, entry))
        sample = self.dataset[at]
        if any(level.takes_more for level in self._levels):
            content = self._content(at, sample)
            for level, kept, entry in before:
                if content != kept:  # what does not load is not kept again and again
                    level.put(at, content, entry)
        return sample

    def begin_part(self, share: float) -> None:
        """Begin anew with `share` of the memory, and of what is free in the folder, in a file that nobody else has and
        that is gone with this process: how Srift measures steps of later epochs on a part of the samples.
        """
        self._levels = [self._in_memory(share * self.memory_gib * _GIB)] if self.memory_gib else []
        if self.folder is not None:
            with _or_without(self.folder):
                number, path = tempfile.mkstemp(prefix="srift-", dir=self.folder)
                os.unlink(path)
                _begin(number, self._head)
                most = share * max(0, _free(number) - _LEAST_FREE)
                self._levels.append(_Level(number, self._head, most_bytes=most))

    def _in_memory(self, most_bytes: float) -> _Level:
        number = os.memfd_create("srift-cache")
        _begin(number, self._head)
        told = "" if self.folder is not None else f"in {self.memory_gib:g} GiB of memory"
        return _Level(number, self._head, most_bytes=most_bytes, told=told)

    def _content(self, at: int, sample: Any) -> bytes:
        content = _pickled(at, sample)
        if self._to_read_twice:
            self._to_read_twice -= 1
            try:
                pickle.loads(content)
            except Exception as error:
                raise ValueError(
                    f"sample {at} cannot be kept, its pickle does not load: {error}"
                ) from error
            if _pickled(at, self.dataset[at]) != content:
                raise ValueError(
                    f"sample {at} of {type(self.dataset).__name__} is another one each time it is read, and a cache"
                    " would give the first in every epoch: cache the dataset that reads and decodes, and augment"
                    " outside of it, DataLoader(Augmented(Cached(dataset)))"
                )
        return content


class _Level:
    """Samples in one file. Neither `get` nor `put` raises: what cannot be read or kept is not there.

    `path` is where other processes find it; by default where it lies among this process's open files. `told` is what a
    warning calls it once it takes no more; empty: none is given.
    """

    def __init__(
        self,
        number: int,
        head: bytes,
        *,
        path: str = "",
        most_bytes: float = float("inf"),
        told: str = "",
    ) -> None:
        """`number` is its file's among those that the process has open, which this object closes."""
        self._number, self._head, self._most_bytes, self._told = number, head, most_bytes, told
        self._path = path or f"/proc/{os.getpid()}/fd/{number}"
        self._named, self._over, self._stalls = bool(path), False, 0
        samples: int = _HEAD.unpack(head)[2]
        self._first = _INDEX + samples * _ENTRY.size
        if number >= 0:
            weakref.finalize(self, os.close, number)

    def __reduce__(self) -> tuple[Any, ...]:
        """A process that is started anew opens the same file."""
        return _reopened, (self._path, self._head, self._named, self._most_bytes, self._told)

    @property
    def takes_more(self) -> bool:
        """Whether samples are still kept."""
        try:
            return not (self._over or self._state()[1])
        except (OSError, struct.error):
            return False

    def get(self, at: int) -> tuple[bytes | None, bytes]:
        """The pickle of a sample, None where it is not kept, or damaged; and what the index has of it."""
        entry = b""
        try:
            entry = os.pread(self._number, _ENTRY.size, self._entry(at))
            begin, size, checksum = _ENTRY.unpack(entry)
            if not size or begin + size > os.fstat(self._number).st_size:
                return None, entry
            content = os.pread(self._number, size, begin)
        except (OSError, struct.error):
            return None, entry
        return content if zlib.crc32(content, at & 0xFFFFFFFF) == checksum else None, entry

    def put(self, at: int, content: bytes, before: bytes) -> None:
        """Keep a sample, if there is room, and if the index still has `before` of it, as `get` gave it: otherwise
        another process was faster.
        """
        if not self.takes_more:
            return
        try:
            with _locked(self._number):
                self._stalls = 0
                end, full = self._state()
                if full or os.pread(self._number, _ENTRY.size, self._entry(at)) != before:
                    return
                reason = self._no_room(end, len(content))
                if not reason:
                    os.pwrite(self._number, _STATE.pack(end + len(content), 0), _HEAD.size)
                    if os.pwrite(self._number, content, end) == len(content):
                        checksum = zlib.crc32(content, at & 0xFFFFFFFF)
                        os.pwrite(
                            self._number, _ENTRY.pack(end, len(content), checksum), self._entry(at)
                        )
        except TimeoutError as error:  # of the lock: a stall, which others may not have
            self._stalls += 1
            if self._stalls == _MOST_STALLS:
                self._over = True
                self._warn(str(error.strerror))
            return
        except OSError as error:
            reason = error.strerror or str(error)
        except struct.error:
            reason = "its file was cut short"
        if reason:
            self._end(reason)

    def _entry(self, at: int) -> int:
        return _INDEX + at * _ENTRY.size

    def _state(self) -> tuple[int, int]:
        end, full = _STATE.unpack(os.pread(self._number, _STATE.size, _HEAD.size))
        return end, full

    def _no_room(self, end: int, size: int) -> str:
        """Why there is no room for so many bytes more; empty where there is."""
        if end - self._first + size > self._most_bytes:
            return "full"
        if self._named and _free(self._number) - size < _LEAST_FREE:
            return f"less than {_LEAST_FREE / _GIB:g} GiB are free"
        return ""

    def _end(self, reason: str) -> None:
        """Take no more in any process; the first to find so says it."""
        self._over, full = True, 0
        with suppress(OSError, struct.error), _locked(self._number):
            end, full = self._state()
            os.pwrite(self._number, _STATE.pack(end, 1), _HEAD.size)
        if not full:
            self._warn(reason)

    def _warn(self, reason: str) -> None:
        if self._told:
            _LOG.warning(
                "data cache: no more samples are kept %s (%s); the others are read and decoded in every epoch",
                self._told,
                reason,
            )


class _Pickler(pickle.Pickler):
    """Tensors as their numbers alone: torch would write all of the memory that a view is of."""

    def reducer_override(self, part: Any) -> Any:
        """How `part` is written; NotImplemented: as usual."""
        plain = type(part) is Tensor and part.layout is torch.strided and part.device.type == "cpu"
        if not plain or part.requires_grad or part.is_conj() or part.is_neg() or part.is_quantized:
            return NotImplemented
        dense = part if part.is_contiguous() else part.clone()
        numbers = bytearray(
            ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size())
        )
        return _tensor, (numbers, dense.dtype, tuple(dense.shape), dense.stride(), part.__dict__)


class _Summer(_Pickler):
    """Writes into a checksum, and adds to `modules` those of all types and functions that it meets."""

    def __init__(self, summed: Any, modules: set[str]) -> None:
        super().__init__(SimpleNamespace(write=summed.update), protocol=5)
        self.modules = modules

    def persistent_id(self, part: Any) -> Any:
        """Sets by the sorted digests of what is in them: pickle's order of them is another in each process."""
        if not isinstance(part, (set, frozenset)):
            return None
        digests = []
        for one in part:
            summed = hashlib.sha256()
            _Summer(summed, self.modules).dump(one)
            digests.append(summed.digest())
        return type(part), sorted(digests), getattr(part, "__dict__", None)

    def reducer_override(self, part: Any) -> Any:
        """How `part` is written."""
        if isinstance(part, Cached):  # another level of the same samples
            return Cached, (part.dataset,)
        if isinstance(part, FunctionType):
            self.modules.add(part.__module__ or "__main__")
        else:
            kind = part if isinstance(part, type) else type(part)
            self.modules |= {one.__module__ for one in kind.__mro__}
        return super().reducer_override(part)


def _tensor(
    numbers: bytearray,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    attributes: dict[str, Any] | None = None,
) -> Tensor:
    if numbers:
        made = torch.frombuffer(numbers, dtype=dtype).as_strided(shape, stride)
    else:  # of which torch makes no buffer
        made = torch.empty_strided(shape, stride, dtype=dtype)
    made.__dict__.update(attributes or {})
    return made


def _pickled(at: int, sample: Any) -> bytes:
    written = io.BytesIO()
    try:
        _Pickler(written, protocol=5).dump(sample)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"sample {at} cannot be kept: {error}") from error
    return written.getvalue()


def _digest(dataset: Samples, samples: int, key: str) -> bytes:
    """What tells a dataset's samples from others. Raises ValueError for one that has no key, and cannot be pickled or
    is of a module without a file.
    """
    kind = type(dataset)
    summed = hashlib.sha256(
        repr((__name__, samples, key, sys.version_info[:2], str(torch.__version__))).encode()
    )
    if key:
        summed.update(repr((kind.__module__, kind.__qualname__)).encode())
        return summed.digest()
    modules: set[str] = set()
    try:
        _Summer(summed, modules).dump(dataset)
        for module in sorted(modules):
            summed.update(module.encode() + _code(module))
    except Exception as error:
        raise ValueError(
            f"nothing tells the samples of {kind.__name__} in a folder from another dataset's ({error}): state `key`, a"
            " name of this dataset alone, which you change whenever its samples change"
        ) from error
    return summed.digest()


def _code(name: str) -> bytes:
    """The file of a module; nothing for compiled ones. Raises OSError where it has no file that can be read."""
    if _compiled(name):
        return b""
    file = getattr(sys.modules[name], "__file__", None)
    if not file:
        raise OSError(f"the code of module {name!r} is in no file")
    return Path(file).read_bytes()


def _compiled(name: str) -> bool:
    """Whether a module is built in, an extension, or a name that extensions give to the module of their types."""
    if name not in sys.modules or name.startswith(
        "_cython_"
    ):  # pickle loads the modules of Python's own types
        return True
    module, parent = sys.modules[name], name.rpartition(".")[0]
    file = getattr(module, "__file__", None) or ""
    if not file and parent in sys.modules:  # torch._C._functions
        return _compiled(parent)
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return origin in ("built-in", "frozen") or file.endswith(tuple(EXTENSION_SUFFIXES))


def _open(path: Path, head: bytes) -> int:
    """The level's file, begun where it is not whole. Raises OSError, also where it is another user's."""
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(number).st_uid != os.getuid():
            raise PermissionError(0, "another user's file lies there")
        with _locked(number):
            if os.pread(number, len(head), 0) != head:
                _begin(number, head)
            else:  # what was full when another run began to read may have room by now
                end, _ = _STATE.unpack(os.pread(number, _STATE.size, _HEAD.size))
                os.pwrite(number, _STATE.pack(end, 0), _HEAD.size)
    except BaseException:
        os.close(number)
        raise
    return number


def _begin(number: int, head: bytes) -> None:
    """An empty index, and the head last: a file without it is begun again. Raises OSError."""
    first = _INDEX + _HEAD.unpack(head)[2] * _ENTRY.size
    os.ftruncate(number, 0)
    os.ftruncate(number, first)
    os.pwrite(number, _STATE.pack(first, 0), _HEAD.size)
    os.pwrite(number, head, 0)


def _reopened(path: str, head: bytes, named: bool, most_bytes: float, told: str) -> _Level:
    """In a process that was started anew: what its parent has; nothing is kept where that is gone."""
    number = -1
    with suppress(OSError):
        number = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.pread(number, len(head), 0) != head:
            os.close(number)
            number = -1
    return _Level(number, head, path=path if named else "", most_bytes=most_bytes, told=told)


def _free(number: int) -> int:
    """Bytes that are free where a file lies."""
    disk = os.fstatvfs(number)
    return disk.f_bavail * disk.f_frsize


_THREADS = [threading.Lock()]  # the kernel's locks are a process's: its threads need one beside


def _new_lock() -> None:
    """In a forked process, whose parent may have forked it while another thread had the lock."""
    _THREADS[0] = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


@contextmanager
def _locked(number: int) -> Iterator[None]:
    """The only process that writes the file's state. Raises OSError, TimeoutError where another one has the lock."""
    with _THREADS[0]:
        until = time.monotonic() + _LOCKED_WITHIN_S
        while True:
            try:
                fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > until:
                    raise TimeoutError(0, "another process keeps it locked") from None
                time.sleep(0.0005)
        try:
            yield
        finally:
            fcntl.lockf(number, fcntl.LOCK_UN, 1)


@contextmanager
def _or_without(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, a folder that cannot be used is said, and done without."""
    try:
        yield
    except OSError as error:
        _LOG.warning(
            "data cache: no samples are kept in %s (%s); what memory does not hold is read and decoded in every epoch",
            os.fspath(folder),
            error.strerror or error,
        )
