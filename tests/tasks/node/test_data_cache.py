"""A cache gives the samples of its dataset, once read; what cannot be kept is read as if there were none."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, StackDataset, Subset

from tasks.node import data_cache
from tasks.node.data_cache import Cached
from tasks.node.entrypoint import LoadedWorkload
from tasks.node.loader import Loader, LoaderError, _caches
from tasks.node.measuring import Patience
from tasks.node.record import Item
from tasks.node.steps import train

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on few cores

SAMPLES = 40


class Rows(Dataset[tuple[Tensor, int]]):
    """Of eight numbers each; a byte of the file `reads` for each time that one is read."""

    def __init__(self, reads: Path, scale: float = 1.0, *, slow_s: float = 0.0) -> None:
        self.reads, self.scale, self.slow_s = str(reads), scale, slow_s

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        with open(self.reads, "ab") as file:
            file.write(b".")
        time.sleep(self.slow_s)
        return torch.full((8,), self.scale * place), place


class Flipped(Dataset[tuple[Tensor, int]]):
    """Turns about half of the samples round."""

    def __init__(self, rows: Dataset[tuple[Tensor, int]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        numbers, label = self.rows[place]
        numbers.mul_(1 if torch.rand(()) < 0.5 else -1)
        return numbers, label


class Moody(Rows):
    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return super().__getitem__(place)[0] + torch.rand(8), place


class Negated(Rows):
    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return -super().__getitem__(place)[0], place


class Overtaken(Rows):
    """Whose samples `others` read while it does."""

    others: Cached | None = None

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        if self.others is not None:
            self.others[place]
        return super().__getitem__(place)


class OneWay:
    """Is written, and does not load."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


class Unloadable(Rows):
    def __getitem__(self, place: int) -> Any:
        return super().__getitem__(place)[1], OneWay()


class Plain:
    """No Dataset of torch's."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, place: int) -> Any:
        return self.source[place]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class NoLength(Dataset[int]):
    def __getitem__(self, place: int) -> int:
        return place


@pytest.fixture
def reads(tmp_path: Path) -> Path:
    return tmp_path / "reads"


def count(reads: Path) -> int:
    """Since it was last asked."""
    number = reads.stat().st_size if reads.exists() else 0
    reads.write_bytes(b"")
    return number


def epochs(dataset: Dataset[Any], number: int = 2, **options: Any) -> list[Tensor]:
    torch.manual_seed(3)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=8, shuffle=True, **options)
    return [torch.cat([numbers[:, 0] for numbers, _ in loader]) for _ in range(number)]


def level_file(folder: Path) -> Path:
    return next(folder.glob("srift-*.cache"))


def kept_bytes(folder: Path) -> int:
    """Of samples, in the only file."""
    return level_file(folder).stat().st_size - data_cache._INDEX - SAMPLES * data_cache._ENTRY.size


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("memory_gib", [0.0, 1.0])
def test_epochs_are_those_without_a_cache_augmentation_and_all_and_each_sample_is_read_once(
    reads: Path, tmp_path: Path, workers: int, memory_gib: float
) -> None:
    plain = epochs(Flipped(Rows(reads)), num_workers=workers)
    count(reads)
    kept = Cached(Rows(reads), memory_gib=memory_gib, folder=None if memory_gib else tmp_path)
    first = epochs(Flipped(kept), 1, num_workers=workers)
    assert count(reads) == SAMPLES + data_cache._READ_TWICE * max(1, workers)
    both = epochs(Flipped(kept), num_workers=workers)
    assert count(reads) == 0, "workers that are forked anew find what those before them read"
    assert torch.equal(first[0], plain[0]) and all(map(torch.equal, both, plain))
    assert not torch.equal(both[0].sign(), both[1].sign()) and len(kept) == SAMPLES


@pytest.mark.local
def test_workers_that_are_started_anew_share_the_memory_too(reads: Path) -> None:
    kept = Cached(Rows(reads))
    epochs(kept, 1)
    assert count(reads) == SAMPLES + data_cache._READ_TWICE
    again = epochs(kept, 1, num_workers=1, multiprocessing_context="spawn")
    assert again[0].sort().values.tolist() == list(range(SAMPLES)) and count(reads) == 0


def test_samples_that_change_are_refused_and_so_are_datasets_without_numbered_ones(
    reads: Path,
) -> None:
    with pytest.raises(
        ValueError, match=r"sample 5 of Moody is another one each time .* augment outside"
    ):
        Cached(Moody(reads))[5]
    with pytest.raises(TypeError, match="Stream is an IterableDataset"):
        Cached(Stream())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="NoLength has no __len__"):
        Cached(NoLength())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keeps nothing"):
        Cached(Rows(reads), memory_gib=0)
    with pytest.raises(IndexError):
        Cached(Rows(reads))[SAMPLES]
    assert Cached(Rows(reads))[-1][1] == SAMPLES - 1


def test_what_exceeds_the_memory_is_read_again_and_said_once_or_lies_in_the_folder(
    reads: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = len(data_cache._pickled(0, Rows(reads)[0]))
    count(reads)
    room = {"memory_gib": 10.5 * size / 2**30}
    alone = Cached(Rows(reads), **room)
    epochs(alone, 3)
    assert count(reads) == SAMPLES + data_cache._READ_TWICE + 2 * (SAMPLES - 10)
    assert [
        one.message for one in caplog.records if "no more samples are kept in" in one.message
    ] == [one.message for one in caplog.records] and len(caplog.records) == 1
    caplog.clear()
    epochs(Cached(Rows(reads), **room, folder=tmp_path), 3)
    assert count(reads) == SAMPLES + data_cache._READ_TWICE and not caplog.records


def test_a_file_serves_other_processes_and_runs_of_the_same_dataset_alone(
    reads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Cached(Rows(reads), folder=tmp_path) for _ in range(2))
    assert torch.equal(epochs(first, 1)[0], epochs(second, 1)[0])
    assert count(reads) == SAMPLES + data_cache._READ_TWICE
    assert Cached(Rows(reads, 2.0), folder=tmp_path)[7][0][0] == 14.0, (
        "another argument, another dataset"
    )
    assert Cached(Rows(reads), folder=tmp_path, key="one")[7][0][0] == 7.0
    assert Cached(Negated(reads), folder=tmp_path, key="one")[7][0][0] == -7.0, (
        "another type, the same key"
    )
    source = tmp_path / "changed.py"
    source.write_text("# other code")
    monkeypatch.setattr(sys.modules[__name__], "__file__", str(source))
    count(reads)
    Cached(Rows(reads), folder=tmp_path)[7]
    assert count(reads) == 2, "other code, another dataset"
    strange = Rows(reads)
    strange.reader = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"nothing tells the samples of Rows .* state `key`"):
        Cached(strange, folder=tmp_path)
    for _ in range(2):
        assert Cached(strange, folder=tmp_path, key="v1")[7][1] == 7
    assert count(reads) == 2
    assert all(one.stat().st_mode & 0o077 == 0 for one in tmp_path.glob("srift-*.cache"))


def test_what_is_damaged_or_half_written_is_read_from_the_dataset(
    reads: Path, tmp_path: Path
) -> None:
    epochs(Cached(Rows(reads), memory_gib=0, folder=tmp_path), 1)
    whole = level_file(tmp_path).read_bytes()
    started = data_cache._INDEX + SAMPLES * data_cache._ENTRY.size
    for damaged in (
        whole[: started + (len(whole) - started) // 2],  # data that never reached the disk
        whole[:started] + bytes(len(whole) - started),  # or their index alone did
        bytes(10),  # or not even the head
        whole[: data_cache._INDEX] + b"\xff" * (len(whole) - data_cache._INDEX),
    ):
        level_file(tmp_path).write_bytes(damaged)
        count(reads)
        kept = Cached(Rows(reads), memory_gib=0, folder=tmp_path)
        assert [int(kept[at][0][0]) for at in range(SAMPLES)] == list(range(SAMPLES))
        assert count(reads) > 1
        assert [kept[at][1] for at in range(SAMPLES)] == list(range(SAMPLES)) and count(
            reads
        ) == 0, "kept anew"


@pytest.mark.parametrize("refuses", ["disk", "reserve", "folder", "lock"])
def test_a_disk_that_takes_no_more_is_said_once_and_done_without(
    reads: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refuses: str,
) -> None:
    folder, write = tmp_path / "cache", os.pwrite

    def full(number: int, content: bytes, begin: int) -> int:
        if begin > data_cache._INDEX + SAMPLES * data_cache._ENTRY.size + 2000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(number, content, begin)

    def locked(*_: object) -> None:
        raise BlockingIOError

    if refuses == "folder":
        folder.write_text("no folder")
    made = Cached(Rows(reads), memory_gib=0, folder=folder)
    if refuses == "disk":
        monkeypatch.setattr(os, "pwrite", full)
    if refuses == "reserve":
        monkeypatch.setattr(data_cache, "_free", lambda _: data_cache._LEAST_FREE)
    if refuses == "lock":
        monkeypatch.setattr(data_cache, "_LOCKED_WITHIN_S", 0.01)
        monkeypatch.setattr("fcntl.lockf", locked)
    found = epochs(made, 3)
    assert all(one.sort().values.tolist() == list(range(SAMPLES)) for one in found)
    assert count(reads) > 2 * SAMPLES and [one.levelno for one in caplog.records] == [
        logging.WARNING
    ]
    assert str(folder) in caplog.text and "read and decoded in every epoch" in caplog.text


def test_a_stall_of_the_lock_costs_a_sample_and_three_in_a_row_end_the_cache_of_this_process_alone(
    reads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(data_cache, "_READ_TWICE", 0)
    kept, others = (Cached(Rows(reads), memory_gib=0, folder=tmp_path) for _ in range(2))
    lock, stalls = fcntl.lockf, [1]

    def stalled(*options: Any) -> None:
        if stalls:
            stalls.pop()
            raise BlockingIOError
        lock(*options)

    def kept_by(cached: Cached, at: int) -> bool:
        cached[at], count(reads), cached[at]
        return count(reads) == 0

    monkeypatch.setattr(data_cache, "_LOCKED_WITHIN_S", -1.0)
    monkeypatch.setattr("fcntl.lockf", stalled)
    kept[0]
    assert kept_by(kept, 0) and not caplog.records
    stalls += [1, 1]
    assert not kept_by(kept, 1)
    assert kept_by(kept, 2), "two in a row"
    stalls += [1, 1, 1]
    for at in (3, 4, 5):
        kept[at]
    assert not kept_by(kept, 6) and kept_by(others, 6)
    assert len(caplog.records) == 1 and "another process keeps it locked" in caplog.text


def test_what_another_process_kept_in_the_meantime_is_not_kept_again(
    reads: Path, tmp_path: Path
) -> None:
    faster, slower = (
        Cached(Overtaken(reads), memory_gib=0, folder=tmp_path, key="v1") for _ in range(2)
    )
    slower.dataset.others = faster  # type: ignore[attr-defined]
    assert slower[5][1] == faster[5][1] == 5
    assert kept_bytes(tmp_path) == len(data_cache._pickled(5, Rows(reads)[5]))


def test_what_does_not_load_is_refused_or_takes_room_once(
    reads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"sample 4 cannot be kept, .* does not load"):
        Cached(Unloadable(reads))[4]
    monkeypatch.setattr(data_cache, "_READ_TWICE", 0)
    kept = Cached(Unloadable(reads), memory_gib=0, folder=tmp_path)
    for _ in range(3):
        assert kept[4][0] == 4
    assert kept_bytes(tmp_path) == len(data_cache._pickled(4, Unloadable(reads)[4]))


def test_a_dataset_whose_code_is_in_no_file_needs_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = types.ModuleType("notebook")
    source = "class Cells:\n def __len__(self): return 1\n def __getitem__(self, place): return 1"
    exec(source, notebook.__dict__)
    monkeypatch.setitem(sys.modules, "notebook", notebook)
    with pytest.raises(
        ValueError, match=r"samples of Cells .*'notebook' is in no file.* state `key`"
    ):
        Cached(notebook.Cells(), folder=tmp_path)
    monkeypatch.setattr(notebook, "__file__", "<stdin>", raising=False)
    with pytest.raises(ValueError, match="state `key`"):
        Cached(notebook.Cells(), folder=tmp_path)
    assert Cached(notebook.Cells(), folder=tmp_path, key="v1")[0] == 1
    monkeypatch.setattr(data_cache, "__file__", "")
    compiled = Rows(tmp_path)
    compiled.parts = [torch.float32, np.arange(3), torch.Generator, len, Path()]  # type: ignore[attr-defined]
    assert len(data_cache._digest(compiled, 1, "")) == 32, "of compiled types nothing is asked"


@pytest.mark.local
def test_processes_that_order_sets_differently_have_one_file(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(
        "import torch\n"
        "class Names(set): pass\n"
        "class Named:\n"
        "    def __init__(self):\n"
        "        self.names, self.more = set('abcdefgh'), [frozenset('ijkl'), Names('mnop')]\n"
        "        self.scale = torch.nn.Parameter(torch.ones(3))\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, place): return place\n"
    )
    script = "import named; from tasks.node.data_cache import Cached; Cached(named.Named(), folder='cache')"
    paths = os.pathsep.join((str(tmp_path), str(Path(data_cache.__file__).parents[2])))
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": paths}
        subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    ones, others = (data_cache._digest(set(names), 1, "") for names in ("ab", "ac"))  # type: ignore[arg-type]
    assert ones != others


def hammer(folder: Path, reads: Path, seed: int, rounds: int = 20) -> None:
    kept = Cached(Rows(reads, slow_s=0.001), memory_gib=0, folder=folder)
    order = torch.Generator().manual_seed(seed)
    for _ in range(rounds):
        for at in torch.randperm(SAMPLES, generator=order).tolist():
            if not torch.equal(kept[at][0], torch.full((8,), float(at))) or kept[at][1] != at:
                os._exit(3)
    os._exit(0)


@pytest.mark.local
def test_processes_that_fill_one_file_at_once_never_get_a_wrong_sample_though_some_are_killed(
    reads: Path, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    endless = 10**9  # rounds of the one that is killed, however late that is
    made = [
        context.Process(target=hammer, args=(tmp_path, reads, n, 20 if n else endless))
        for n in range(4)
    ]
    for one in made:
        one.start()
    time.sleep(0.02)
    made[0].kill()
    for one in made:
        one.join(300)
    assert [one.exitcode for one in made] == [-signal.SIGKILL, 0, 0, 0]
    size = len(data_cache._pickled(0, Rows(reads)[0]))
    assert SAMPLES * size <= kept_bytes(tmp_path) <= (SAMPLES + 1) * size, (
        "one was perhaps half written"
    )


def test_samples_come_back_as_they_are_and_no_view_takes_what_it_is_a_view_of(reads: Path) -> None:
    table = torch.arange(2_000_000, dtype=torch.float32).reshape(1000, 2000)
    named = torch.ones(2)
    named.meaning = "two"  # type: ignore[attr-defined]
    sample = {
        "view": table[3, :100],
        "turned": table[:4, :5].t(),
        "wide": torch.ones(3, 1).expand(3, 4),
        "no number": table[:0],
        "turned, no number": torch.zeros(4, 0, dtype=torch.int8).t(),
        "named": named,
        "half": torch.ones((), dtype=torch.bfloat16),
        "truth": torch.tensor([True, False]),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "words": ["a", ("b", None)],
        "weights": nn.Parameter(torch.ones(2)),
    }
    content = data_cache._pickled(0, sample)
    back = pickle.loads(content)
    assert len(content) < 20_000
    for name, one in sample.items():
        if isinstance(one, Tensor):
            assert (
                torch.equal(back[name], one)
                and back[name].dtype == one.dtype
                and type(back[name]) is type(one)
            )
            assert back[name].shape == one.shape and back[name].__dict__ == one.__dict__
    assert back["turned"].stride() == (1, 5), "columns first, as it was, without those between"
    assert np.array_equal(back["array"], sample["array"]) and back["words"] == sample["words"]  # type: ignore[arg-type]
    back["view"].zero_(), back["array"].fill(0)
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    assert data_cache._pickled(0, weights[0]) == data_cache._pickled(0, weights[1]), (
        "no address is in it"
    )
    with pytest.raises(ValueError, match="sample 4 cannot be kept"):
        data_cache._pickled(4, lambda: None)


def measured(dataset: Dataset[Any], workers: int = 0) -> tuple[float, Loader]:
    """Seconds that a step of 8 samples waits, as a run has them."""
    model = nn.Linear(8, 1)
    loader = Loader(DataLoader(dataset, num_workers=workers), seed=1)
    built = LoadedWorkload(
        model=model,
        loss=lambda made, target: (made.mean(dim=1) - target).square().mean() * 1e-9,
        make_batch=loader,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-12),
        loader=loader,
    )
    item = Item(
        run_id="r",
        kind="train",
        nodes=[0],
        batches=[8],
        warmup_steps=1,
        least_steps=6,
        most_steps=6,
    )
    try:
        values, problem = train(item, built, None, Patience(), place=0)
    finally:
        built.close()
    assert not problem
    return values["input_s"], loader


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_measured_of_a_cache_is_a_later_epoch_and_leaves_nothing_on_the_disk(
    reads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr("tasks.node.loader._READ_S", 0.3)
    slow = Rows(reads, slow_s=0.02)
    without, loader = measured(Flipped(slow), workers)
    assert without > 0.03 and not loader._among
    for options in ({}, {"memory_gib": 0, "folder": tmp_path}):
        kept = Subset(Flipped(Cached(slow, **options)), range(30))
        waited, loader = measured(kept, workers)
        assert waited < without / 4 and 2 <= len(loader._among) < 30
    head = data_cache._INDEX + SAMPLES * data_cache._ENTRY.size
    assert [one.stat().st_size for one in tmp_path.glob("srift-*")] == [head], (
        "of the user's own file the head alone"
    )


def test_caches_are_found_in_all_that_datasets_are_made_of(
    reads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Cached(Rows(reads))
    stacked: StackDataset[Any] = StackDataset(x=kept, y=Rows(reads))
    chained = Plain([[], {"held": (kept,)}])
    chained.source.append(chained)
    labelled = Plain([("label", place) for place in range(10**5)])
    labelled.part = Plain(Plain(kept))  # type: ignore[attr-defined]
    for dataset in (kept, stacked, Flipped(Plain(kept)), chained, labelled):  # type: ignore[arg-type]
        assert list(_caches(dataset)) == [kept]
    monkeypatch.setattr("tasks.node.loader._MOST_LOOKED_INTO", 50)
    assert not list(_caches(Plain([*([place] for place in range(99)), kept]))), "the search ends"


def test_an_empty_dataset_with_a_cache_is_said_to_be_empty(reads: Path) -> None:
    loader = Loader(DataLoader(Plain(Subset(Cached(Rows(reads)), [])), sampler=[]), seed=1)  # type: ignore[arg-type]
    loader.as_in_later_epochs()
    with pytest.raises(LoaderError, match="is empty"):
        loader(8)


def test_a_cache_for_half_of_the_samples_is_measured_with_half_of_those_that_are_read(
    reads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.node.loader._READ_MOST", 20)
    size = len(data_cache._pickled(0, Rows(reads)[0]))
    kept = Cached(Rows(reads), memory_gib=(SAMPLES / 2 + 0.5) * size / 2**30)
    loader = Loader(DataLoader(kept), seed=1)
    loader.as_in_later_epochs()
    count(reads)
    for place in loader._among:
        kept[place]
    assert len(loader._among) == 20 and count(reads) == 10
