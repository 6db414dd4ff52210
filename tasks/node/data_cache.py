"""Samples of a dataset, read and decoded once: in memory, and on a disk for other ranks and runs.

Copy this file beside a script that trains: it needs Linux and torch, and nothing else of Srift.

A level is one file that all processes of a machine share: without a name, in memory, or in a
folder.

    head     magic, digest, number of samples
    state    the end of the used part; 1 when nothing more is kept
    index    for each sample its begin, bytes and checksum; zeros if it is not kept
    samples  pickles, one after another

Under a lock a process reserves room, writes a sample there, and its index entry last. A half
written sample has no entry, and what a machine without power left fits no checksum: both are read
from the dataset again.
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
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

_GIB = 2**30
_MIN_FREE = 5 * _GIB  # of a disk, for checkpoints and other files of a training
_READ_TWICE = 3  # samples that a process reads again, to see that they stay the same
_LOCK_S = 6.0  # the holder of the lock may be stopped, or a file server gone
_MAGIC = b"srift-1\n"
_HEAD, _STATE, _ENTRY = struct.Struct("<8s32sQ"), struct.Struct("<QQ"), struct.Struct("<QQQ")
_INDEX = _HEAD.size + _STATE.size
_LOG = logging.getLogger(__name__)


class Cached(Dataset[Any]):
    """The samples of `dataset`, each read from it once.

    What the dataset draws at random would be the same in every epoch. So wrap the dataset that
    reads and decodes, and augment outside of the cache. The first samples are read twice, and
    refused if they differ:

        loader = DataLoader(Augmented(Cached(Photos(folder), memory_gib=8), RandomCrop(224)), ...)

    The first samples fill `memory_gib` of memory, which the loader's workers share; each rank of a
    machine has its own. `folder`, on a local disk, keeps all samples for all processes of this user
    and for later runs, while at least 5 GiB are free. Samples that neither keeps are read in every
    epoch, and one warning says so. The page cache of the file gives way to other needs.

    A file belongs to one dataset: its type and attributes, as pickle has them, and the text of
    their modules, which a notebook lacks. Files that it reads are not looked at. `key` replaces
    all but the name of the type: change it whenever the samples change. Two datasets of a type that
    differ by their arguments need two keys.

    Raises TypeError for a dataset without numbered samples, and ValueError if nothing would be
    kept, or if the dataset has no digest.
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
        self._head = _HEAD.pack(_MAGIC, digest, self._samples)
        self._levels = self._in_memory(1.0)
        if folder is not None:
            path = Path(folder, f"srift-{digest.hex()[:24]}.cache")
            with _or_without(folder):
                path.parent.mkdir(parents=True, exist_ok=True)
                file = _open(path, self._head)
                self._levels.append(_Level(file, self._head, path=str(path), label=str(path)))

    def __len__(self) -> int:
        """The number of samples when the dataset was wrapped."""
        return self._samples

    def __getitem__(self, place: int) -> Any:
        """A copy of a sample.

        Raises IndexError, ValueError for a sample that cannot be kept or that changes, and what the
        dataset raises.
        """
        at = operator.index(place)
        at += self._samples if at < 0 else 0
        if not 0 <= at < self._samples:
            raise IndexError(f"no sample {place} of {self._samples}")
        missed: list[tuple[_Level, bytes | None, bytes]] = []
        for level in self._levels:
            content, entry = level.get(at)
            if content is not None:
                with suppress(Exception):  # written by other versions of its modules
                    sample = pickle.loads(content)
                    for faster, _, old in missed:
                        faster.put(at, content, old)
                    return sample
            missed.append((level, content, entry))
        sample = self.dataset[at]
        if any(level.takes_more for level in self._levels):
            content = self._content(at, sample)
            for level, kept, entry in missed:
                if content != kept:  # what does not load is not kept again
                    level.put(at, content, entry)
        return sample

    def begin_part(self, share: float) -> None:
        """Begin anew with `share` of the memory, and of the folder's free space in a private file.

        Srift measures steps of later epochs on a part of the samples by it.
        """
        self._levels = self._in_memory(share)
        if self.folder is not None:
            with _or_without(self.folder):
                file, path = tempfile.mkstemp(prefix="srift-", dir=self.folder)
                os.unlink(path)
                _begin(file, self._head)
                room = share * max(0, _free(file) - _MIN_FREE)
                self._levels.append(_Level(file, self._head, max_bytes=room))

    def _in_memory(self, share: float) -> list[_Level]:
        if not self.memory_gib:
            return []
        file = os.memfd_create("srift-cache")
        _begin(file, self._head)
        label = f"{self.memory_gib:g} GiB of memory" if self.folder is None else ""
        room = share * self.memory_gib * _GIB
        return [_Level(file, self._head, max_bytes=room, label=label)]

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
                    f"sample {at} of {type(self.dataset).__name__} changes when it is read again."
                    " Augment outside of the cache: DataLoader(Augmented(Cached(dataset)))"
                )
        return content


class _Level:
    """Samples in one file. `get` and `put` do not raise: what cannot be read or kept is missing.

    Other processes open `path`, by default this process's descriptor. A warning calls the level
    `label`; without one there is no warning.
    """

    def __init__(
        self,
        file: int,
        head: bytes,
        *,
        path: str = "",
        max_bytes: float = float("inf"),
        label: str = "",
    ) -> None:
        self._file, self._head, self._max_bytes, self._label = file, head, max_bytes, label
        self._path = path or f"/proc/{os.getpid()}/fd/{file}"
        self._is_named, self._is_over = bool(path), False
        if file >= 0:
            weakref.finalize(self, os.close, file)

    def __reduce__(self) -> tuple[Any, ...]:
        """A spawned process opens the same file."""
        return _reopened, (self._path, self._head, self._is_named, self._max_bytes, self._label)

    @property
    def takes_more(self) -> bool:
        try:
            return not (self._is_over or self._state()[1])
        except (OSError, struct.error):
            return False

    def get(self, at: int) -> tuple[bytes | None, bytes]:
        """The pickle of a sample, None if it is missing or damaged, and its index entry."""
        entry = b""
        try:
            entry = self._entry(at)
            begin, size, checksum = _ENTRY.unpack(entry)
            if not size or begin + size > os.fstat(self._file).st_size:
                return None, entry
            content = os.pread(self._file, size, begin)
        except (OSError, struct.error):
            return None, entry
        return content if _checksum(content, at) == checksum else None, entry

    def put(self, at: int, content: bytes, before: bytes) -> None:
        """Keep a sample if there is room, and if its entry is still `before`.

        Otherwise another process was faster.
        """
        if not self.takes_more:
            return
        try:
            with _locked(self._file):
                end, is_full = self._state()
                if is_full or self._entry(at) != before:
                    return
                reason = self._no_room(end, len(content))
                if not reason:
                    os.pwrite(self._file, _STATE.pack(end + len(content), 0), _HEAD.size)
                    if os.pwrite(self._file, content, end) == len(content):
                        entry = _ENTRY.pack(end, len(content), _checksum(content, at))
                        os.pwrite(self._file, entry, _INDEX + at * _ENTRY.size)
        except TimeoutError as error:  # of the lock, which other processes may get
            self._is_over = True
            self._warn(str(error))
            return
        except (OSError, struct.error) as error:
            reason = str(error)
        if reason:
            self._end(reason)

    def _entry(self, at: int) -> bytes:
        return os.pread(self._file, _ENTRY.size, _INDEX + at * _ENTRY.size)

    def _state(self) -> tuple[int, int]:
        end, is_full = _STATE.unpack(os.pread(self._file, _STATE.size, _HEAD.size))
        return end, is_full

    def _no_room(self, end: int, size: int) -> str:
        """Why there is no room for `size` more bytes; empty if there is."""
        if end - _first(self._head) + size > self._max_bytes:
            return "full"
        if self._is_named and _free(self._file) - size < _MIN_FREE:
            return f"less than {_MIN_FREE / _GIB:g} GiB are free"
        return ""

    def _end(self, reason: str) -> None:
        """Keep no more in any process; the first one warns."""
        self._is_over, was_full = True, 0
        with suppress(OSError, struct.error), _locked(self._file):
            end, was_full = self._state()
            os.pwrite(self._file, _STATE.pack(end, 1), _HEAD.size)
        if not was_full:
            self._warn(reason)

    def _warn(self, reason: str) -> None:
        if self._label:
            _warn(self._label, reason)


class _Pickler(pickle.Pickler):
    """Writes a tensor's numbers alone: torch would write all memory that a view is of."""

    def reducer_override(self, part: Any) -> Any:
        is_plain = type(part) is Tensor and part.layout is torch.strided and part.is_cpu
        if not is_plain or part.requires_grad or part.is_conj() or part.is_neg():
            return NotImplemented
        dense = part if part.is_contiguous() else part.clone()
        content = bytearray(ctypes.string_at(dense.data_ptr(), dense.nbytes))
        return _tensor, (content, dense.dtype, tuple(dense.shape), dense.stride(), part.__dict__)


class _Summer(_Pickler):
    """Writes into a checksum; collects in `modules` those of all types and functions."""

    def __init__(self, checksum: Any, modules: set[str]) -> None:
        super().__init__(SimpleNamespace(write=checksum.update), protocol=5)
        self.modules = modules

    def persistent_id(self, part: Any) -> Any:
        """Sets by sorted digests of their items: pickle's order differs between processes."""
        if not isinstance(part, set | frozenset):
            return None
        digests = []
        for item in part:
            checksum = hashlib.sha256()
            _Summer(checksum, self.modules).dump(item)
            digests.append(checksum.digest())
        return type(part), sorted(digests), getattr(part, "__dict__", None)

    def reducer_override(self, part: Any) -> Any:
        if isinstance(part, Cached):  # another level of the same samples
            return Cached, (part.dataset,)
        if isinstance(part, FunctionType):
            self.modules.add(part.__module__ or "__main__")
        else:
            kind = part if isinstance(part, type) else type(part)
            self.modules |= {base.__module__ for base in kind.__mro__}
        return super().reducer_override(part)


def _tensor(
    content: bytearray,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    attributes: dict[str, Any],
) -> Tensor:
    made = torch.empty_strided(shape, stride, dtype=dtype)
    if content:  # else torch makes no buffer
        made = torch.frombuffer(content, dtype=dtype).as_strided(shape, stride)
    made.__dict__.update(attributes)
    return made


def _pickled(at: int, sample: Any) -> bytes:
    written = io.BytesIO()
    try:
        _Pickler(written, protocol=5).dump(sample)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"sample {at} cannot be kept: {error}") from error
    return written.getvalue()


def _checksum(content: bytes, at: int) -> int:
    return zlib.crc32(content, at & 0xFFFFFFFF)


def _digest(dataset: Any, samples: int, key: str) -> bytes:
    """Identify a dataset's samples.

    Raises ValueError without a key, if it cannot be pickled or a module has no file.
    """
    kind = type(dataset)
    versions = (__name__, samples, key, sys.version_info[:2], str(torch.__version__))
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
            f"the samples of {kind.__name__} have no digest ({error}). State `key`, a name of this"
            " dataset that changes with its samples"
        ) from error
    return checksum.digest()


def _code(name: str) -> bytes:
    """The file of a module, nothing for compiled ones. Raises OSError if there is none."""
    if _is_compiled(name):
        return b""
    file = getattr(sys.modules[name], "__file__", None)
    if not file:
        raise OSError(f"module {name!r} has no file")
    return Path(file).read_bytes()


def _is_compiled(name: str) -> bool:
    """Whether a module is built in, an extension, or a name that an extension gives its types."""
    module, parent = sys.modules.get(name), name.rpartition(".")[0]
    if module is None or name.startswith("_cython_"):
        return True
    file = getattr(module, "__file__", None) or ""
    if not file and parent in sys.modules:  # torch._C._functions
        return _is_compiled(parent)
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return origin in ("built-in", "frozen") or file.endswith(tuple(EXTENSION_SUFFIXES))


def _open(path: Path, head: bytes) -> int:
    """The level's file, begun if it is not whole. Raises OSError, also if another user owns it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(file).st_uid != os.getuid():
            raise PermissionError("another user owns the file")
        with _locked(file):
            if os.pread(file, len(head), 0) != head:
                _begin(file, head)
            else:  # a level that was full may have room by now
                end, _ = _STATE.unpack(os.pread(file, _STATE.size, _HEAD.size))
                os.pwrite(file, _STATE.pack(end, 0), _HEAD.size)
    except BaseException:
        os.close(file)
        raise
    return file


def _begin(file: int, head: bytes) -> None:
    """Write an empty index, and the head last: a file without it is begun again."""
    os.ftruncate(file, 0)
    os.ftruncate(file, _first(head))
    os.pwrite(file, _STATE.pack(_first(head), 0), _HEAD.size)
    os.pwrite(file, head, 0)


def _first(head: bytes) -> int:
    """Where samples begin."""
    samples: int = _HEAD.unpack(head)[2]
    return _INDEX + samples * _ENTRY.size


def _reopened(path: str, head: bytes, is_named: bool, max_bytes: float, label: str) -> _Level:
    """The parent's level in a spawned process; an empty one if its file is gone."""
    file = -1
    with suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.pread(file, len(head), 0) != head:
            os.close(file)
            file = -1
    return _Level(file, head, path=path if is_named else "", max_bytes=max_bytes, label=label)


def _free(file: int) -> int:
    """Free bytes of the file's disk."""
    disk = os.fstatvfs(file)
    return disk.f_bavail * disk.f_frsize


_THREADS = [threading.Lock()]  # the kernel's locks are a process's, so its threads need one too


def _new_lock() -> None:
    """For a forked process: another thread of the parent may have held the lock."""
    _THREADS[0] = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


@contextmanager
def _locked(file: int) -> Iterator[None]:
    """Write the file's state alone. Raises TimeoutError if another process holds the lock."""
    with _THREADS[0]:
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


@contextmanager
def _or_without(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Warn of a folder that cannot be used, and do without it."""
    try:
        yield
    except OSError as error:
        _warn(os.fspath(folder), str(error))


def _warn(place: str, reason: str) -> None:
    _LOG.warning(
        "data cache: no more samples are kept in %s (%s); others are read in every epoch",
        place,
        reason,
    )
