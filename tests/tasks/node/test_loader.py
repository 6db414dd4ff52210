"""A workload's own loader: rebuilt as its user set it, watched, and ended with its rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.node import processes, profiler
from tasks.node.entrypoint import LoadedWorkload, WorkloadError, build, own_line, try_once
from tasks.node.launch import explain
from tasks.node.loader import Cost, LoaderError, running, worker_deaths_ignored
from tasks.node.measuring import Patience
from tasks.node.precision import Arithmetic
from tasks.node.record import Item, Plan, WorkloadFile
from tasks.node.steps import train
from tasks.node.worker import lost_peer

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on few cores

TEXT = """
import os, signal, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

class Rows(Dataset):
    def __init__(self, samples):
        self.samples = samples
    def __len__(self):
        return self.samples
    def __getitem__(self, place):
        return self.row(place)
    def row(self, place):
        return torch.full((4,), float(place)), torch.zeros(1)

class Slow(Rows):
    def __getitem__(self, place):
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        return self.row(place)

class Broken(Rows):
    def __getitem__(self, place):
        raise ValueError(f"row {place * 0} is not a number")

class Dying(Rows):
    def __getitem__(self, place):
        os.kill(os.getpid(), signal.SIGKILL)

class Hanging(Rows):
    def __getitem__(self, place):
        if self.samples == 77:
            time.sleep(1000)
        return self.row(place)

class Three(Rows):
    def __getitem__(self, place):
        return (*self.row(place), 1)

class NoLength(Dataset):
    def __getitem__(self, place):
        return torch.zeros(4), torch.zeros(1)

class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples
    def __iter__(self):
        me = get_worker_info()
        for place in range(self.samples):
            yield torch.full((4,), float(place)), torch.zeros(1)

class Own(DataLoader):
    def __iter__(self):
        return iter([])

def five(rows):
    return torch.zeros(5, 4), torch.zeros(5, 1)

begun = []

def build(loader):
    model = nn.Linear(4, 1)
    made = eval(loader)
    return model, nn.MSELoss(), made, torch.optim.SGD(model.parameters(), lr=1e-4)
"""

FILE = WorkloadFile(name="net", digest="d1", file="d1.py", function="build", source="mine.py")


def line(text: str) -> int:
    """Of the workload's file, by what stands there."""
    return next(number for number, one in enumerate(TEXT.splitlines(), 1) if text in one)


@pytest.fixture
def built(tmp_path: Path) -> Iterator[Builder]:
    made = Builder(tmp_path)
    yield made
    for one in made.all:
        one.close()


class Builder:
    """Builds the workload around a loader that is given as text."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "d1.py").write_text(TEXT)
        self.all: list[LoadedWorkload] = []

    def __call__(self, loader: str, *, seed: int = 0, rank: int = 0) -> LoadedWorkload:
        file = WorkloadFile(
            name="net",
            digest="d1",
            file="d1.py",
            function="build",
            source="mine.py",
            arguments={"loader": loader},
        )
        self.all.append(build(self.folder, file, seed=seed, rank=rank, computing=Arithmetic()))
        return self.all[-1]


def places(made: LoadedWorkload, batch: int, batches: int = 2) -> list[float]:
    return [one for _ in range(batches) for one in made.make_batch(batch)[0][:, 0].tolist()]


@pytest.mark.parametrize("workers", [0, 2])
def test_indices_are_drawn_by_the_seed_and_others_on_each_rank_whatever_order_the_user_had(
    built: Builder, workers: int
) -> None:
    text = f"DataLoader(Rows(1000), batch_size=3, num_workers={workers})"
    first, again, other_rank, other_seed = (
        places(built(text, seed=seed, rank=rank), 8)
        for seed, rank in ((0, 0), (0, 0), (0, 1), (1, 0))
    )
    assert first == again and len(first) == 16
    assert first != other_rank and first != other_seed and first != sorted(first)


def test_what_the_user_set_stays_but_the_batch_and_the_order(built: Builder) -> None:
    made = built(
        "DataLoader(Rows(50), batch_size=3, num_workers=2, prefetch_factor=5, persistent_workers=True, timeout=7,"
        " collate_fn=lambda rows: (torch.stack([one for one, _ in rows]) + 1000, torch.zeros(len(rows), 1)),"
        " worker_init_fn=lambda worker: torch.manual_seed(worker), generator=torch.Generator())"
    )
    assert min(places(made, 4)) >= 1000
    loader = made.loader
    assert loader is not None and loader._rebuilt is not None
    rebuilt, given = loader._rebuilt, loader.given
    for name in (
        "num_workers",
        "prefetch_factor",
        "persistent_workers",
        "timeout",
        "collate_fn",
        "generator",
    ):
        assert getattr(rebuilt, name) == getattr(given, name)
    assert rebuilt.batch_size == 4 and made.make_batch(6)[0].shape == (6, 4), (
        "another batch, another loader"
    )


@pytest.mark.parametrize("timeout", [0, 7, 600])
def test_a_loader_is_waited_for_shorter_than_a_collective_whose_peers_would_hide_its_reason(
    built: Builder, timeout: int
) -> None:
    made = built(f"DataLoader(Rows(50), batch_size=3, num_workers=1, timeout={timeout})")
    made.make_batch(4)
    assert made.loader is not None and made.loader._rebuilt is not None
    waits_s = made.loader._rebuilt.timeout
    assert waits_s == 7 if timeout == 7 else 30.0 <= waits_s <= Plan.timeout_s - 10.0


def test_a_stream_is_read_as_it_is_and_begins_again_when_it_ends(built: Builder) -> None:
    made = built("DataLoader(Stream(10), batch_size=3)")
    assert places(made, 4, batches=3) == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3], (
        "what fills no batch is left out"
    )


@pytest.mark.parametrize(
    ("loader", "said", "at"),
    [
        (
            "DataLoader(Rows(0), batch_size=2)",
            "the dataset of its loader is empty",
            "def __getitem__",
        ),
        (
            "DataLoader(Rows(5), batch_size=2)",
            "has 5 samples, fewer than a batch of 8",
            "def __getitem__",
        ),
        ("DataLoader(Stream(0), batch_size=2)", "ends before it gave 8 samples", "def __iter__"),
        (
            "DataLoader(Stream(7), num_workers=2)",
            "gave 8 samples from any of its 2 workers",
            "def __iter__",
        ),
        (
            "DataLoader(Rows(50), collate_fn=five)",
            "inputs that its loader gave are not of 8 samples; they have 5",
            "",
        ),
        (
            "DataLoader(Three(50))",
            "gave 3 parts as a batch, where a pair (inputs, target) is due",
            "",
        ),
        ("DataLoader(Rows(50), collate_fn=len)", "gave int as a batch", ""),
        ("DataLoader(NoLength(), sampler=[1, 2])", "has no __len__", ""),
        ("DataLoader(Rows(50), batch_size=None)", "has no batch_size", ""),
        ("DataLoader(Rows(50), batch_sampler=[[1, 2]])", "has no batch_size", ""),
        ("Own(Rows(50))", "an __iter__ of its own, whose batches Srift cannot set", ""),
        ("DataLoader(Dying(50), num_workers=1)", "a worker of its loader died", ""),
        ("DataLoader(Hanging(77), num_workers=1, timeout=1)", "gave no batch within 1 s", ""),
        ("DataLoader(Broken(50), num_workers=2)", "row 0 is not a number", "raise ValueError"),
        ("DataLoader(Broken(50))", "row 0 is not a number", "raise ValueError"),
    ],
)
def test_what_is_wrong_with_a_loader_is_one_sentence_with_the_users_line_and_no_lost_peer(
    built: Builder, loader: str, said: str, at: str
) -> None:
    with pytest.raises((LoaderError, ValueError)) as raised:
        try_once(built(loader), 8)
    message = explain(raised.value, FILE)
    assert said in message and "\n" not in message
    assert "(mine.py, line " in message and (not at or f"line {line(at)}, in " in message)
    assert not lost_peer(raised.value), "else the launch would end without a record of it"


def test_samples_of_torchs_own_datasets_are_blamed_on_the_function_that_made_the_loader(
    built: Builder,
) -> None:
    with pytest.raises(LoaderError) as raised:
        try_once(
            built(
                "DataLoader(torch.utils.data.TensorDataset(torch.zeros(3, 4), torch.zeros(3, 1)))"
            ),
            8,
        )
    assert own_line(raised.value, FILE) == f"mine.py, line {line('def build')}, in build"


def test_what_is_neither_a_batch_maker_nor_a_loader_is_refused(built: Builder) -> None:
    with pytest.raises(WorkloadError, match="a batch maker or a DataLoader"):
        built("Rows(50)")


def workers_of(made: LoadedWorkload) -> list[int]:
    assert made.loader is not None
    return [one.pid for one in made.loader._processes if one.pid is not None]


def state(process: int) -> str:
    """R, S, T (stopped) ... as proc(5) has it; empty once it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def stand_still(workers: list[int]) -> bool:
    """Whether all of them do, a moment later at the most."""
    until = time.monotonic() + 5
    while {state(one) for one in workers} - {"T"} and time.monotonic() < until:
        time.sleep(0.01)
    return not {state(one) for one in workers} - {"T"}


def test_workers_stand_still_outside_of_what_is_measured_and_are_gone_afterwards(
    built: Builder,
) -> None:
    made = built("DataLoader(Rows(50), batch_size=2, num_workers=2)")
    made.make_batch(4)
    workers = workers_of(made)
    assert len(workers) == 2
    with running(made.loader):
        made.make_batch(4)
    assert stand_still(workers)
    with running(made.loader):
        made.make_batch(4)
    made.close()
    assert [state(one) for one in workers] == ["", ""] and not workers_of(made)


def test_a_connection_that_a_dead_worker_reset_is_told_as_its_death(
    built: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = built("DataLoader(Rows(50), batch_size=2, num_workers=1)")
    made.make_batch(4)
    assert made.loader is not None

    class Resets:
        def __next__(self) -> None:
            worker = workers_of(made)[0]
            until = time.monotonic() + 20
            with worker_deaths_ignored():
                os.kill(worker, signal.SIGKILL)
                while state(worker) not in ("", "Z") and time.monotonic() < until:
                    time.sleep(0.01)
                time.sleep(0.2)  # it is seen to be dead before its parent is told
            raise ConnectionResetError("Connection reset by peer")

    monkeypatch.setattr(made.loader, "_iterator", Resets())
    with pytest.raises(LoaderError, match="a worker of its loader died: exit code -9"):
        made.make_batch(4)


def test_no_death_of_a_worker_interrupts_what_reports_an_error() -> None:
    def interrupt(*_: object) -> None:
        raise RuntimeError("a worker died")

    before = signal.signal(signal.SIGCHLD, interrupt)
    try:
        with worker_deaths_ignored():
            os.kill(os.getpid(), signal.SIGCHLD)
        with pytest.raises(RuntimeError, match="a worker died"):
            os.kill(os.getpid(), signal.SIGCHLD)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_workers_hand_batches_over_however_long_the_path_of_their_folder_is(
    built: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    made = built("DataLoader(Rows(50), num_workers=1)")
    assert made.make_batch(4)[0].shape == (4, 4)
    made.close()
    assert list(deep.iterdir()) == []


RANK = """
import sys, os, signal, time
from pathlib import Path
import torch
from tasks.node.entrypoint import build
from tasks.node.precision import Arithmetic
from tasks.node.record import WorkloadFile

text = "DataLoader(Hanging(77), num_workers=2)"
file = WorkloadFile(name="net", digest="d1", file="d1.py", function="build", arguments={"loader": text})
made = build(Path(sys.argv[1]), file, seed=0, rank=0, computing=Arithmetic())
made.loader._batch, made.loader._rebuilt = 4, made.loader._rebuild(4)
made.loader._begin()
time.sleep(0.5)
print(*[one.pid for one in made.loader._processes], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.local
def test_workers_end_with_their_rank_however_that_ends(built: Builder) -> None:
    here = {**os.environ, "PYTHONPATH": str(Path(processes.__file__).parents[2])}
    said = built.folder / "said"
    with said.open("w") as out:  # no pipe: workers that live on would hold it open
        ended = subprocess.run(
            [sys.executable, "-c", RANK, str(built.folder)], env=here, stdout=out, timeout=60
        )
    workers = [int(one) for one in said.read_text().split()]
    assert ended.returncode == -signal.SIGKILL and len(workers) == 2
    until = (
        time.monotonic() + 2
    )  # torch looks whether the rank is there every five seconds, between two samples
    while any(state(one) not in ("", "Z") for one in workers) and time.monotonic() < until:
        time.sleep(0.05)
    left = [one for one in workers if state(one) not in ("", "Z")]
    for one in left:
        os.kill(one, signal.SIGKILL)
    assert not left


def test_a_profile_tells_what_a_sample_costs_its_processor_with_no_worker_at_all(
    built: Builder,
) -> None:
    made = built("DataLoader(Slow(50), batch_size=2, num_workers=3)")
    item = Item(run_id="p", kind="profile", nodes=[0], batches=[2, 4])
    try_once(made, 2)
    assert len(workers_of(made)) == 3
    patch = pytest.MonkeyPatch()
    patch.setattr(profiler, "_buckets", lambda *_: [])
    patch.setattr(profiler, "_BATCH_S", 0.01)
    try:
        values, problem = profiler.profile(item, made, None, Patience())  # type: ignore[arg-type]
    finally:
        patch.undo()
    assert problem == "" and values["loader_workers"] == 3 and not workers_of(made)
    assert 0.01 <= values["load_s"] < 0.02 and values["load_wait_s"] >= 0
    assert [row["batch"] for row in values["rows"]] == [2, 4] and all(
        "costs" not in row for row in values["rows"]
    )
    assert all(row["input_s"] >= 0.01 * row["batch"] for row in values["rows"])


def test_waiting_is_distinguished_from_computing_and_files_from_memory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(300_000))
    before = Cost.now()
    time.sleep(0.2)
    file.read_bytes()
    found = Cost.now().since(before)
    assert 0.1 < found.waited_s <= found.wall_s and found.processor_s < 0.1
    assert 300_000 <= found.read_bytes < 400_000


@pytest.mark.parametrize("workers", [0, 1])
def test_a_runs_wait_is_a_part_of_its_step_and_a_fast_loader_has_none(
    built: Builder, workers: int
) -> None:
    item = Item(
        run_id="r",
        kind="train",
        nodes=[0],
        workload="net",
        batches=[8],
        warmup_steps=1,
        least_steps=4,
        most_steps=4,
    )
    made = built(f"DataLoader(Slow(50), batch_size=2, num_workers={workers})")
    values, problem = train(item, made, None, Patience(), place=0)
    assert problem == "" and values["loader_workers"] == workers and values["sync_s"] == 0.0
    ahead = (
        6 * workers
    )  # samples that a worker may have made before the first of 32: two batches, and one under way
    assert (
        values["step_s"] > 0.08 * (1 - ahead / 32)
        and 0.7 < values["input_s"] / values["step_s"] < 1
    )
    assert len(workers_of(made)) == workers and stand_still(workers_of(made)), (
        "until the item is over"
    )


def test_steps_are_measured_over_whole_turns_of_the_workers(built: Builder) -> None:
    item = Item(
        run_id="r",
        kind="train",
        nodes=[0],
        workload="net",
        batches=[4],
        warmup_steps=1,
        least_steps=4,
        most_steps=4,
    )
    values, _ = train(item, built("DataLoader(Rows(50), num_workers=3)"), None, Patience(), place=0)
    assert values["steps"] % 3 == 0 and values["steps"] >= 4
