"""Cache the decoded samples of a dataset in memory, or on disk for all ranks and later runs.

You can copy this file and use it in your training script. It needs only Linux and torch.

The cache is one file, in memory or in a folder. Processes that share the file share the cache.
The file has three parts:

    head     digest of the dataset
    index    offset, size in bytes and checksum of each sample; zeros if the sample is not cached
    samples  pickles, one after another

A process holds a lock while it appends a sample, and writes the index entry last. A half-written
sample therefore has no entry. A damaged sample does not match its checksum in the index. Samples
without an entry and damaged samples are read from the dataset again.
"""

import ctypes
import fcntl
import hashlib
import io
import logging
import math
import os
import pickle
import shutil
import struct
import sys
import time
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

_GIB = 2**30
_MIN_FREE = 5 * _GIB  # bytes of the disk to leave free for other files of the training
_READ_TWICE = 3  # number of samples that each process reads twice, to detect samples that change
# Maximum seconds to wait for the lock. The process with the lock may be stopped, or the file server
# may be down.
_LOCK_S = 6.0
_HEAD_BYTES, _ENTRY = 32, struct.Struct("<QQQ")
_LOG = logging.getLogger(__name__)


class Cached(Dataset[Any]):
    """A dataset that reads each sample of `dataset` once, and returns it from a cache afterwards.

    A random augmentation inside the cache would give the same result in every epoch. Therefore
    wrap only the dataset that reads and decodes, and augment the samples that the cache returns:

        loader = DataLoader(Augmented(Cached(Photos(folder), memory_gib=8), RandomCrop(224)), ...)

    The first samples are read twice, to detect random augmentation. Samples that do not fit into
    the cache are read from `dataset` in every epoch.

    Args:
        memory_gib: GiB of memory for the samples of one rank. Used only if `folder` is not given.
        folder: a folder on a local disk that keeps samples for all processes of this user and for
            later runs. Samples are added while at least 5 GiB of the disk are free.
        key: a text that names the version of the samples, such as "photos-v2". Datasets in `folder`
            share samples only if key, type and length are equal. Change the key whenever the
            samples change, for example because of new code or arguments of the dataset.

    Raises:
        TypeError: the dataset has no `__len__`, or is an IterableDataset.
        ValueError: `folder` is given without `key`.
        OSError: `folder` cannot be used, or another user owns the file in it.
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
        if isinstance(dataset, IterableDataset):
            raise TypeError(f"{kind.__name__} needs __getitem__ and __len__ to be cached")
        if folder is not None and not key:
            raise ValueError(
                "`folder` needs `key`, a text that you change whenever the samples change"
            )
        self.dataset, self.memory_gib, self.folder = dataset, memory_gib, folder
        self._samples, self._to_read_twice = len(dataset), _READ_TWICE
        # Pickled samples refer to this module by name, so the name is part of the identity.
        names = (__name__, kind.__module__, kind.__qualname__)
        identity = (self._samples, key, names, sys.version_info[:2], str(torch.__version__))
        self._digest = hashlib.sha256(repr(identity).encode()).digest()
        path, room = "", memory_gib * _GIB
        if folder is not None:
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"srift-{self._digest.hex()[:24]}.cache")
            room = math.inf
        self._store = _Store(path, self._digest, self._samples, room)

    def __len__(self) -> int:
        """Return the number of samples that the dataset had when it was wrapped."""
        return self._samples

    def __getitem__(self, place: int) -> Any:
        """Return the sample at index `place` from the cache, or else from the dataset.

        Negative indices count from the end. Raises IndexError if there is no such sample. Raises
        ValueError if the sample cannot be pickled, or if two reads of the sample differ. Also
        raises the errors of the dataset.
        """
        at = range(self._samples)[place]
        content = self._store.get(at)
        if content is not None:
            # unpickling fails if another version of the sample's modules wrote the pickle
            with suppress(Exception):
                return pickle.loads(content)
        sample = self.dataset[at]
        if self._store.full:
            return sample
        content = _pickle(at, sample)
        if self._to_read_twice:
            self._to_read_twice -= 1
            if _pickle(at, self.dataset[at]) != content:
                raise ValueError(
                    f"sample {at} of {type(self.dataset).__name__} changes when it is read again."
                    " Apply random augmentation to the samples of the cache, not inside the cached"
                    " dataset: DataLoader(Augmented(Cached(dataset)))"
                )
        self._store.put(at, content)
        return sample

    def begin_share(self, share: float) -> None:
        """Replace the cache by an empty cache in memory, with a new size limit.

        The new limit is `share` times the original limit. To time steps, Srift loads only the
        fraction `share` of the dataset's samples. If the original cache has room for 30 % of all
        samples, then the new cache has room for 30 % of the loaded samples.
        """
        # In memory even with a folder, because so few samples would stay in the page cache anyway.
        room = self.memory_gib * _GIB
        if self.folder is not None:
            room = max(0, shutil.disk_usage(self.folder).free - _MIN_FREE)
        self._store = _Store("", self._digest, self._samples, share * room)


class _Store:
    """The file with the samples and the index of a cache.

    path: the path of the file; "" creates a file in memory.
    digest: the first bytes of the file, which identify the dataset. An existing file that begins
        with other bytes is emptied.
    samples: the number of entries in the index.
    room: the maximum total size of the samples in bytes. If infinite, samples are added until
        only _MIN_FREE bytes of the disk are free.
    """

    def __init__(self, path: str, digest: bytes, samples: int, room: float) -> None:
        """Open or create the file of the cache.

        Raises OSError if the file cannot be opened, or if another user owns it.
        """
        if path:
            follow = 0 if path.startswith("/proc/") else os.O_NOFOLLOW
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | follow, 0o600)
        else:
            self._file = os.memfd_create("srift-cache")
        weakref.finalize(self, os.close, self._file)
        self._path = path or f"/proc/{os.getpid()}/fd/{self._file}"
        self._digest, self._samples, self._room = digest, samples, room
        self._first = _HEAD_BYTES + samples * _ENTRY.size
        # Shared with the loader's workers. The value is 1 as soon as any process finds no room.
        self.full: Tensor = torch.zeros(1).share_memory_()  # type: ignore[no-untyped-call]
        status = os.fstat(self._file)
        if status.st_uid != os.getuid():
            raise PermissionError(f"another user owns {path}")
        with _lock(self._file):
            if status.st_size < self._first or os.pread(self._file, _HEAD_BYTES, 0) != digest:
                os.ftruncate(self._file, 0)
                os.ftruncate(self._file, self._first)
                os.pwrite(
                    self._file, digest, 0
                )  # last, because a file without the digest is emptied

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the store so that a spawned process opens the same file."""
        return _Store, (self._path, self._digest, self._samples, self._room)

    def get(self, at: int) -> bytes | None:
        """Return the pickle of the sample with index `at`; None if it is missing or damaged."""
        try:
            entry = os.pread(self._file, _ENTRY.size, _HEAD_BYTES + at * _ENTRY.size)
            begin, size, checksum = _ENTRY.unpack(entry)
            if not size or begin + size > os.fstat(self._file).st_size:
                return None
            content = os.pread(self._file, size, begin)
        except (OSError, struct.error):
            return None
        return content if zlib.crc32(content, at) == checksum else None

    def put(self, at: int, content: bytes) -> None:
        """Store `content`, the pickle of the sample at index `at`, unless it is already stored.

        If there is no room or the file cannot be written, the cache counts as full from then on. A
        warning is logged once.
        """
        try:
            with _lock(self._file):
                end = os.fstat(self._file).st_size
                left = self._room - (end - self._first)
                if self._room == math.inf:
                    left = shutil.disk_usage(self._file).free - _MIN_FREE
                if len(content) > left:
                    raise OSError("the cache is full")
                if self.get(at) is None:
                    os.pwrite(self._file, content, end)
                    entry = _ENTRY.pack(end, len(content), zlib.crc32(content, at))
                    os.pwrite(self._file, entry, _HEAD_BYTES + at * _ENTRY.size)
        except OSError as error:
            if not self.full:
                self.full.fill_(1)
                _LOG.warning(
                    "data cache %s stores no more samples (%s). In every epoch, the other samples"
                    " are read from the dataset",
                    self._path,
                    error,
                )


class _Pickler(pickle.Pickler):
    """A pickler that writes only the elements of a tensor view, not the view's whole storage."""

    def reducer_override(self, obj: Any) -> Any:
        is_plain = type(obj) is Tensor and obj.layout is torch.strided and obj.is_cpu
        if not is_plain or obj.is_conj() or obj.is_neg() or obj.__dict__:
            return NotImplemented
        dense = obj.detach().contiguous()
        content = bytearray(ctypes.string_at(dense.data_ptr(), dense.nbytes))
        return _tensor, (content, obj.dtype, tuple(obj.shape), obj.requires_grad)


def _tensor(
    content: bytearray, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool
) -> Tensor:
    if not content:  # torch.frombuffer refuses an empty buffer
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)
    return torch.frombuffer(content, dtype=dtype).view(shape).requires_grad_(requires_grad)


def _pickle(at: int, sample: Any) -> bytes:
    """Return the pickle of `sample`. Raises ValueError if the sample cannot be pickled."""
    written = io.BytesIO()
    try:
        _Pickler(written, protocol=5).dump(sample)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"sample {at} cannot be cached: {error}") from error
    return written.getvalue()


@contextmanager
def _lock(file: int) -> Iterator[None]:
    """Return a context manager that holds a file's lock, to exclude other processes.

    Raises TimeoutError if another process holds the lock for _LOCK_S seconds.
    """
    # Threads of the same process are not excluded. A sample that two threads write at the same time
    # has a wrong checksum, so it counts as missing.
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            break
        except (BlockingIOError, PermissionError):
            if time.monotonic() > until:
                raise TimeoutError("another process holds the lock of the cache file") from None
            time.sleep(0.0005)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, 1)
