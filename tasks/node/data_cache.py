"""Caches the decoded samples of a dataset in memory, and on disk for other ranks and later runs.

You can copy this file beside your training script: it needs only Linux and torch.

Each level of the cache is one file, in memory or in a folder, that all processes of a machine
share:

    head     magic number, digest of the dataset, number of samples
    full     1 once the level keeps no more samples
    index    offset, bytes and checksum of each sample; zeros if the level does not have it
    samples  pickles, one after another

A process holds a lock while it appends a sample, and writes the index entry last. So a half-written
sample has no entry. A sample damaged by a power failure does not match its checksum. In both cases
the cache reads the sample from the dataset again.
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
import time
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

_GIB = 2**30
_MIN_FREE = 5 * _GIB  # bytes of the disk to leave free for other files of a training
_READ_TWICE = 3  # samples that each process reads twice, to detect samples that change
_LOCK_S = 6.0  # the process with the lock may be stopped, or a file server may be down
_HEAD, _ENTRY = struct.Struct("<8s32sQ"), struct.Struct("<QQQ")
_INDEX = _HEAD.size + 8  # after the head and the flag `full`, padded to 8 bytes
_LOG = logging.getLogger(__name__)


class Cached(Dataset[Any]):
    """A dataset that reads each sample of `dataset` once and keeps it.

    Random augmentation inside the cache would repeat the same values in every epoch. So wrap the
    dataset that reads and decodes, and augment outside the cache:

        loader = DataLoader(Augmented(Cached(Photos(folder), memory_gib=8), RandomCrop(224)), ...)

    The first samples are read twice, and refused if the two readings differ.

    Args:
        memory_gib: GiB of memory for samples. The workers of a loader share the memory; each rank
            of a machine has its own.
        folder: a folder on a local disk that keeps all samples, for all processes of this user and
            for later runs, while at least 5 GiB are free. The operating system frees the pages of
            the file when other programs need memory.
        key: a text that identifies the samples in `folder`, together with the name of the
            dataset's type. Change it whenever the samples change, and use different keys for
            datasets of one type with different arguments. Without a key, the dataset's type, its
            pickled attributes and the source of their modules identify the samples; a class
            defined in a notebook has no source. Changes of the files that the dataset reads are
            not noticed.

    Samples that fit neither in memory nor in the folder are read in every epoch. A warning is
    logged once.

    Raises:
        TypeError: the dataset has no `__getitem__` or `__len__`, or is an IterableDataset.
        ValueError: neither memory nor folder is given, or the dataset cannot be identified.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        memory_gib: float = 1.0,
        folder: str | os.PathLike[str] | None = None,
        key: str = "",
    ) -> None:
        kind = type(dataset)
        is_numbered = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
        if isinstance(dataset, IterableDataset) or not is_numbered:
            raise TypeError(f"{kind.__name__} needs __getitem__ and __len__ to be cached")
        if memory_gib < 0 or (memory_gib == 0 and folder is None):
            raise ValueError(f"a cache of {memory_gib:g} GiB of memory and no folder keeps nothing")
        self.dataset, self.memory_gib, self.folder = dataset, memory_gib, folder
        self._samples = len(dataset)
        self._to_read_twice = _READ_TWICE
        digest = os.urandom(32) if folder is None else _digest(dataset, self._samples, key)
        self._head = _HEAD.pack(b"srift-2\n", digest, self._samples)
        self._levels = [self._in_memory(memory_gib * _GIB)] if memory_gib else []
        if folder is not None:
            path = Path(folder, f"srift-{digest.hex()[:24]}.cache")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                file = _open(path, self._head)
                self._levels.append(_Level(file, str(path), self._head, None, str(path)))
            except OSError as error:
                _warn(os.fspath(folder), error)

    def __len__(self) -> int:
        """Return the number of samples that the dataset had when it was wrapped."""
        return self._samples

    def __getitem__(self, place: int) -> Any:
        """Return a copy of the sample at index `place`; negative indices count from the end.

        Raises IndexError if there is no such sample, and ValueError if the sample cannot be pickled
        or changes when it is read again. Also raises the errors of the dataset.
        """
        at = operator.index(place)
        at += self._samples if at < 0 else 0
        if not 0 <= at < self._samples:
            raise IndexError(f"there is no sample {place}: the dataset has {self._samples}")
        missed: list[_Level] = []
        for level in self._levels:
            content = level.get(at)
            if content is not None:
                with suppress(Exception):  # another version of its modules may have written it
                    sample = pickle.loads(content)
                    for faster in missed:
                        faster.put(at, content)
                    return sample
            missed.append(level)
        sample = self.dataset[at]
        if any(level.takes_more for level in missed):
            content = self._content(at, sample)
            for level in missed:
                level.put(at, content)
        return sample

    def begin_part(self, share: float) -> None:
        """Empty the cache, and from now on keep samples in memory only.

        The memory has `share` of the total room of memory and folder. Srift calls this method to
        time steps as in later epochs with only a part of the samples. If a folder kept so few
        samples, they would be in the page cache anyway, so memory gives the same times.
        """
        room = self.memory_gib * _GIB
        if self.folder is not None:
            with suppress(OSError):  # the constructor has already logged a warning
                room += max(0, _free(self.folder) - _MIN_FREE)
        self._levels = [self._in_memory(share * room)]

    def _in_memory(self, room: float) -> _Level:
        """Return an empty level in memory for `room` bytes of samples."""
        file = os.memfd_create("srift-cache")
        _begin(file, self._head)
        label = f"{self.memory_gib:g} GiB of memory" if self.folder is None else ""
        return _Level(file, "", self._head, room, label)

    def _content(self, at: int, sample: Any) -> bytes:
        """Return the pickle of `sample`. Raises ValueError if a second reading differs."""
        content = _pickled(at, sample)
        if self._to_read_twice:
            self._to_read_twice -= 1
            if _pickled(at, self.dataset[at]) != content:
                raise ValueError(
                    f"sample {at} of {type(self.dataset).__name__} changes when it is read again."
                    " Augment outside the cache: DataLoader(Augmented(Cached(dataset)))"
                )
        return content


class _Level:
    """One level of the cache: samples in one file.

    `get` and `put` do not raise. A sample that cannot be read or kept counts as missing.

    file: this process's descriptor of the file.
    path: the path by which other processes open the file. If empty, they open the descriptor of
        this process in /proc.
    head: the head that the file must have.
    room: the maximum bytes of samples. If None, the level keeps samples as long as _MIN_FREE bytes
        of the disk are free.
    label: the level's name in the warning that the level is full; if empty, there is no warning.
    """

    def __init__(self, file: int, path: str, head: bytes, room: float | None, label: str) -> None:
        self._file, self._head, self._room, self._label = file, head, room, label
        self._path = path or f"/proc/{os.getpid()}/fd/{file}"
        self._is_over = False
        weakref.finalize(self, os.close, file)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the level such that a spawned process opens the same file."""
        return _reopened, (self._path, self._head, self._room, self._label)

    @property
    def takes_more(self) -> bool:
        """True until a process marks the level as full."""
        try:
            return not self._is_over and os.pread(self._file, 1, _HEAD.size) == b"\0"
        except OSError:
            return False

    def get(self, at: int) -> bytes | None:
        """Return the pickle of sample `at`; None if it is missing or damaged."""
        try:
            entry = os.pread(self._file, _ENTRY.size, _INDEX + at * _ENTRY.size)
            begin, size, checksum = _ENTRY.unpack(entry)
            if not size or begin + size > os.fstat(self._file).st_size:
                return None
            content = os.pread(self._file, size, begin)
        except (OSError, struct.error):
            return None
        return content if _checksum(content, at) == checksum else None

    def put(self, at: int, content: bytes) -> None:
        """Keep the pickle of sample `at` if there is room and no other process has kept it."""
        if not self.takes_more:
            return
        try:
            with _locked(self._file):
                end = os.fstat(self._file).st_size
                reason = self._no_room(end, len(content))
                if not reason and self.get(at) is None:
                    os.pwrite(self._file, content, end)
                    entry = _ENTRY.pack(end, len(content), _checksum(content, at))
                    os.pwrite(self._file, entry, _INDEX + at * _ENTRY.size)
        except TimeoutError as error:  # other processes may still keep samples
            self._is_over = True
            _warn(self._label or self._path, error)
            return
        except OSError as error:
            reason = str(error)
        if reason:
            is_first = self.takes_more
            self._is_over = True
            with suppress(OSError):
                os.pwrite(self._file, b"\1", _HEAD.size)
            if self._label and is_first:
                _warn(self._label, reason)

    def _no_room(self, end: int, size: int) -> str:
        """Return why `size` more bytes do not fit after offset `end`; empty if they fit."""
        if self._room is None:
            is_short = _free(self._file) - size < _MIN_FREE
            return f"less than {_MIN_FREE / _GIB:g} GiB are free" if is_short else ""
        return "full" if end - _first(self._head) + size > self._room else ""


class _Pickler(pickle.Pickler):
    """A pickler that writes only the values of a tensor.

    torch would write the whole storage behind a view.
    """

    def reducer_override(self, obj: Any) -> Any:
        is_plain = type(obj) is Tensor and obj.layout is torch.strided and obj.is_cpu
        if not is_plain or obj.requires_grad or obj.is_conj() or obj.is_neg():
            return NotImplemented
        dense = obj if obj.is_contiguous() else obj.clone()
        content = bytearray(ctypes.string_at(dense.data_ptr(), dense.nbytes))
        return _tensor, (content, dense.dtype, tuple(dense.shape), dense.stride(), obj.__dict__)


class _Summer(_Pickler):
    """A pickler that updates a checksum instead of writing a file.

    It adds to `modules` the modules of the pickled types and functions.
    """

    def __init__(self, checksum: Any, modules: set[str]) -> None:
        super().__init__(SimpleNamespace(write=checksum.update), protocol=5)
        self.modules = modules

    def persistent_id(self, obj: Any) -> Any:
        """Return the type and the sorted digests of the items of a set; None for other objects.

        pickle would write the items in an order that differs between processes.
        """
        if not isinstance(obj, set | frozenset):
            return None
        digests = []
        for item in obj:
            checksum = hashlib.sha256()
            _Summer(checksum, self.modules).dump(item)
            digests.append(checksum.digest())
        return type(obj), sorted(digests)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Cached):  # a cache within a cache: the samples count, not its settings
            return Cached, (obj.dataset,)
        if isinstance(obj, FunctionType):
            self.modules.add(obj.__module__ or "__main__")
        else:
            kind = obj if isinstance(obj, type) else type(obj)
            self.modules |= {base.__module__ for base in kind.__mro__}
        return super().reducer_override(obj)


def _tensor(
    content: bytearray,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    attributes: dict[str, Any],
) -> Tensor:
    found = torch.empty_strided(shape, stride, dtype=dtype)
    if content:  # torch.frombuffer refuses an empty buffer
        found = torch.frombuffer(content, dtype=dtype).as_strided(shape, stride)
    found.__dict__.update(attributes)
    return found


def _pickled(at: int, sample: Any) -> bytes:
    """Return the pickle of sample `at`. Raises ValueError if it cannot be pickled."""
    written = io.BytesIO()
    try:
        _Pickler(written, protocol=5).dump(sample)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"sample {at} cannot be cached: {error}") from error
    return written.getvalue()


def _checksum(content: bytes, at: int) -> int:
    return zlib.crc32(content, at & 0xFFFFFFFF)


def _digest(dataset: Any, samples: int, key: str) -> bytes:
    """Return 32 bytes that identify the samples of `dataset`.

    Without a `key`, raises ValueError if the dataset cannot be pickled, or if a module with code of
    the dataset has no file.
    """
    kind = type(dataset)
    # Pickles name this module's functions, so the module's name counts.
    versions = (samples, key, __name__, sys.version_info[:2], str(torch.__version__))
    checksum = hashlib.sha256(repr(versions).encode())
    if key:
        checksum.update(repr((kind.__module__, kind.__qualname__)).encode())
        return checksum.digest()
    modules: set[str] = set()
    try:
        _Summer(checksum, modules).dump(dataset)
        for module in sorted(modules):
            checksum.update(module.encode() + _code(module))
    except Exception as error:
        raise ValueError(
            f"the samples of {kind.__name__} cannot be identified ({error}). Pass `key`, a name of"
            " the dataset that you change whenever its samples change"
        ) from error
    return checksum.digest()


def _code(name: str) -> bytes:
    """Return the source file of a module; empty for built-in and compiled modules.

    Raises OSError if the module has no file.
    """
    module, parent = sys.modules.get(name), name.rpartition(".")[0]
    file = getattr(module, "__file__", None) or ""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    is_builtin = module is None or origin in ("built-in", "frozen") or name.startswith("_cython_")
    if is_builtin or file.endswith(tuple(EXTENSION_SUFFIXES)):
        return b""
    if not file and parent in sys.modules:  # torch._C._functions
        return _code(parent)
    if not file:
        raise OSError(f"module {name!r} has no file")
    return Path(file).read_bytes()


def _open(path: Path, head: bytes) -> int:
    """Open the file of a level, and initialise it if its head does not match.

    Raises OSError if the file cannot be opened, or if another user owns it.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(file).st_uid != os.getuid():
            raise PermissionError("another user owns the file")
        with _locked(file):
            if os.pread(file, len(head), 0) != head or os.fstat(file).st_size < _first(head):
                _begin(file, head)
            os.pwrite(file, b"\0", _HEAD.size)  # a level that was full may have room now
    except BaseException:
        os.close(file)
        raise
    return file


def _begin(file: int, head: bytes) -> None:
    """Write an empty index and then the head.

    The head comes last, so that `_open` initialises a half-written file again.
    """
    os.ftruncate(file, 0)
    os.ftruncate(file, _first(head))
    os.pwrite(file, head, 0)


def _first(head: bytes) -> int:
    """Return the offset of the first sample."""
    samples: int = _HEAD.unpack(head)[2]
    return _INDEX + samples * _ENTRY.size


def _reopened(path: str, *properties: Any) -> _Level:
    """Return the parent's level in a spawned process.

    If the file of the level is gone, return an empty level that keeps nothing.
    """
    head: bytes = properties[0]
    with suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.pread(file, len(head), 0) == head:
            return _Level(file, path, *properties)
        os.close(file)
    file = os.memfd_create("srift-cache")
    return _Level(file, "", head, 0.0, "")


def _free(place: int | str | os.PathLike[str]) -> int:
    """Return the free bytes of the disk that holds the file or folder `place`."""
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize


@contextmanager
def _locked(file: int) -> Iterator[None]:
    """Hold the lock of a file against other processes.

    Threads of one process share the lock. If two threads write at the same offset, the checksum
    does not match and the sample counts as missing. Raises TimeoutError if another process holds
    the lock for _LOCK_S seconds.
    """
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            break
        except (BlockingIOError, PermissionError):
            if time.monotonic() > until:
                raise TimeoutError("another process holds its lock") from None
            time.sleep(0.0005)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, 1)


def _warn(place: str, reason: object) -> None:
    _LOG.warning(
        "data cache: %s keeps no more samples (%s); other samples are read in every epoch",
        place,
        reason,
    )
