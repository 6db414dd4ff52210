"""A cache returns the samples of its dataset; what it cannot keep it reads again."""

import errno
import logging
import multiprocessing
import os
import pickle
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from tasks.node import data_cache
from tasks.node.data_cache import Cached
from tasks.node.loader import Loader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on few cores

SAMPLES = 40
TWICE = data_cache._READ_TWICE
FIRST = data_cache._HEAD_BYTES + SAMPLES * data_cache._ENTRY.size
ALL = list(range(SAMPLES))


class Rows(Dataset[Any]):
    """Eight numbers a sample; adds a byte to the file `reads` for each read."""

    def __init__(self, reads, scale=1.0, *, slow_s=0.0):
        self.reads, self.scale, self.slow_s = str(reads), scale, slow_s

    def __len__(self):
        return SAMPLES

    def __getitem__(self, place):
        with open(self.reads, "ab") as file:
            file.write(b".")
        time.sleep(self.slow_s)
        return torch.full((8,), self.scale * place), place


class Flipped(Dataset[Any]):
    """Negates about half of the samples."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return SAMPLES

    def __getitem__(self, place):
        numbers, label = self.rows[place]
        return numbers.mul_(1 if torch.rand(()) < 0.5 else -1), label


class Moody(Rows):
    def __getitem__(self, place):
        return super().__getitem__(place)[0] + torch.rand(8), place


class Stream(IterableDataset[int]):
    def __iter__(self):
        return iter(range(3))


@pytest.fixture
def reads(tmp_path):
    return tmp_path / "reads"


def on_disk(reads, folder):
    return Cached(Rows(reads), folder=folder, key="k")


def count(reads):
    """Reads since the last call."""
    number = reads.stat().st_size if reads.exists() else 0
    reads.write_bytes(b"")
    return number


def epochs(dataset, number=2, **options):
    torch.manual_seed(3)
    loader = DataLoader(dataset, batch_size=8, shuffle=True, **options)
    return [torch.cat([numbers[:, 0] for numbers, _ in loader]) for _ in range(number)]


def gib_of(rows, samples):
    return samples * len(data_cache._pickle(0, rows[0])) / 2**30


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_disk", [False, True])
def test_epochs_are_those_without_a_cache_and_each_sample_is_read_once(
    reads, tmp_path, workers, on_disk
):
    plain = epochs(Flipped(Rows(reads)), num_workers=workers)
    count(reads)
    kept = Cached(Rows(reads), folder=tmp_path if on_disk else None, key="k")
    first = epochs(Flipped(kept), 1, num_workers=workers)
    assert count(reads) == SAMPLES + TWICE * max(1, workers)
    both = epochs(Flipped(kept), num_workers=workers)
    assert count(reads) == 0 and len(kept) == SAMPLES
    assert torch.equal(first[0], plain[0]) and all(map(torch.equal, both, plain))


@pytest.mark.local
def test_spawned_workers_share_the_memory_too(reads):
    kept = Cached(Rows(reads))
    epochs(kept, 1)
    count(reads)
    again = epochs(kept, 1, num_workers=1, multiprocessing_context="spawn")
    assert again[0].sort().values.tolist() == ALL and count(reads) == 0


def test_changing_samples_and_datasets_without_numbers_are_refused(reads):
    for dataset in (Stream(), object()):
        with pytest.raises(TypeError):
            Cached(dataset)
    with pytest.raises(ValueError, match="sample 5"):
        Cached(Moody(reads))[5]
    with pytest.raises(ValueError, match="`key`"):
        Cached(Rows(reads), folder=reads)
    with pytest.raises(IndexError):
        Cached(Rows(reads))[SAMPLES]


def test_samples_beyond_the_memory_are_read_again(reads, caplog):
    room = gib_of(Rows(reads), 10.5)
    count(reads)
    epochs(Cached(Rows(reads), memory_gib=room), 3)
    assert count(reads) == SAMPLES + TWICE + 2 * (SAMPLES - 10) and len(caplog.records) == 1


def test_a_file_serves_other_runs_with_the_same_key_and_type_alone(reads, tmp_path):
    for dataset, key in ((Rows(reads), "1"), (Rows(reads), "2"), (Flipped(Rows(reads)), "1")):
        for needed in (2, 0):
            assert Cached(dataset, folder=tmp_path, key=key)[7][1] == 7
            assert count(reads) == needed
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.glob("srift-*.cache"))


def test_damaged_and_half_written_samples_are_read_from_the_dataset(reads, tmp_path):
    epochs(on_disk(reads, tmp_path), 1)
    file = next(tmp_path.glob("srift-*.cache"))
    whole = file.read_bytes()
    for damaged in (
        whole[: FIRST + (len(whole) - FIRST) // 2],
        whole[:FIRST] + bytes(len(whole) - FIRST),
        whole[: FIRST - 50],
        bytes(10),
        whole[:40] + b"\xff" * (len(whole) - 40),
    ):
        file.write_bytes(damaged)
        count(reads)
        kept = on_disk(reads, tmp_path)
        assert [int(kept[at][0][0]) for at in ALL] == ALL
        assert count(reads) > 1
        assert [kept[at][1] for at in ALL] == ALL
        assert count(reads) == 0


def refusing(*_):
    raise BlockingIOError(errno.EWOULDBLOCK, "refused")


@pytest.mark.parametrize(
    ("function", "stands_in"),
    [
        ("os.pwrite", refusing),
        ("fcntl.lockf", refusing),
        ("shutil.disk_usage", lambda _: SimpleNamespace(free=data_cache._MIN_FREE)),
    ],
)
def test_a_disk_that_keeps_no_more_is_warned_of_once(
    reads, tmp_path, monkeypatch, caplog, function, stands_in
):
    made = on_disk(reads, tmp_path)
    monkeypatch.setattr(data_cache, "_LOCK_S", 0.01)
    monkeypatch.setattr(function, stands_in)
    for found in epochs(made, 3):
        assert found.sort().values.tolist() == ALL
    assert count(reads) > 2 * SAMPLES and str(tmp_path) in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_file_of_another_user_and_a_link_are_refused(reads, tmp_path, monkeypatch):
    on_disk(reads, tmp_path)
    [file] = tmp_path.glob("srift-*.cache")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        with pytest.raises(PermissionError):
            on_disk(reads, tmp_path)
    file.rename(tmp_path / "away")
    file.symlink_to(tmp_path / "away")
    with pytest.raises(OSError):
        on_disk(reads, tmp_path)


def hammer(folder, reads, seed, rounds):
    kept = Cached(Rows(reads, slow_s=0.001), folder=folder, key="k")
    order = torch.Generator().manual_seed(seed)
    for _ in range(rounds):
        for at in torch.randperm(SAMPLES, generator=order).tolist():
            if not torch.equal(kept[at][0], torch.full((8,), float(at))) or kept[at][1] != at:
                os._exit(3)
    os._exit(0)


@pytest.mark.local
def test_processes_that_fill_one_file_get_no_wrong_sample_though_one_is_killed(reads, tmp_path):
    context = multiprocessing.get_context("fork")
    rounds = (10**9, 20, 20, 20)
    made = [
        context.Process(target=hammer, args=(tmp_path, reads, *pair)) for pair in enumerate(rounds)
    ]
    for process in made:
        process.start()
    time.sleep(0.02)
    made[0].kill()
    for process in made:
        process.join(300)
    assert [process.exitcode for process in made] == [-signal.SIGKILL, 0, 0, 0]
    size = len(data_cache._pickle(0, Rows(reads)[0]))
    kept = next(tmp_path.glob("srift-*.cache")).stat().st_size - FIRST
    assert SAMPLES * size <= kept <= (SAMPLES + 1) * size  # one may be half written


def test_samples_come_back_as_they_are_and_views_without_what_they_view():
    table = torch.arange(2_000_000, dtype=torch.float32).reshape(1000, 2000)
    tensors = [
        table[3, :100],
        table[:4, :5].t(),
        torch.zeros(4, 0, dtype=torch.int8).t(),
        torch.ones((), dtype=torch.bfloat16, requires_grad=True),
        nn.Parameter(torch.ones(2)),
    ]
    content = data_cache._pickle(0, tensors)
    found = pickle.loads(content)
    assert len(content) < 20_000
    for back, tensor in zip(found, tensors, strict=True):
        assert torch.equal(back, tensor) and back.dtype == tensor.dtype
        assert type(back) is type(tensor)
    assert data_cache._pickle(0, found[3].requires_grad_()) == data_cache._pickle(0, tensors[3])
    found[0].zero_()  # it can be written to
    with pytest.raises(ValueError, match="sample 4"):
        data_cache._pickle(4, lambda: None)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_later_epoch_is_measured_with_a_part_of_the_samples(
    reads, tmp_path, monkeypatch, on_disk
):
    """Of a cache within other datasets, for half of the samples or for all; on no disk."""
    monkeypatch.setattr("tasks.node.loader._MAX_READ", 20)
    half = gib_of(Rows(reads), SAMPLES / 2 + 0.5)
    folder = tmp_path / "cache" if on_disk else None
    kept = Cached(Rows(reads), memory_gib=half, folder=folder, key="k")
    loader = Loader(DataLoader(Subset(Flipped(kept), ALL)), seed=1)
    loader.as_in_later_epochs()
    count(reads)
    for place in loader._places:
        kept[place]
    assert len(loader._places) == 20 and count(reads) == (0 if on_disk else 10)
    assert {path.stat().st_size for path in tmp_path.glob("*/srift-*")} <= {FIRST}
