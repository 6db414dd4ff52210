"""A workload's own loader: rebuilt with the user's settings, watched, and ended with its rank."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.node import processes, profiler
from tasks.node.entrypoint import build, try_once
from tasks.node.launch import explain
from tasks.node.loader import LoaderError, running_workers, worker_deaths_ignored
from tasks.node.precision import Arithmetic
from tasks.node.record import Item, Plan, WorkloadFile
from tasks.node.repetition import Patience
from tasks.node.steps import train
from tasks.node.worker import lost_peer

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on few cores

TEXT = """
import os, signal, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

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
        raise ValueError("not a number")

class Dying(Rows):
    def __getitem__(self, place):
        os.kill(os.getpid(), signal.SIGKILL)

class Hanging(Rows):
    def __getitem__(self, place):
        time.sleep(1000)

class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples
    def __iter__(self):
        for place in range(self.samples):
            yield torch.full((4,), float(place)), torch.zeros(1)

class Own(DataLoader):
    def __iter__(self):
        return iter([])

def five(rows):
    return torch.zeros(5, 4), torch.zeros(5, 1)

def build(loader):
    model = nn.Linear(4, 1)
    made = eval(loader)
    return model, nn.MSELoss(), made, torch.optim.SGD(model.parameters(), lr=1e-4)
"""

FILE = WorkloadFile(name="net", digest="d1", file="d1.py", function="build", source="mine.py")


@pytest.fixture
def built(tmp_path):
    made = Builder(tmp_path)
    yield made
    for loader in made.all:
        loader.close()


class Builder:
    """Builds the workload around a loader that is given as text."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "d1.py").write_text(TEXT)
        self.all = []

    def __call__(self, loader, *, seed=0, rank=0):
        file = replace(FILE, arguments={"loader": loader})
        self.all.append(build(self.folder, file, seed=seed, rank=rank, computing=Arithmetic()))
        return self.all[-1]


def places(made, batch, batches=2):
    return [place for _ in range(batches) for place in made.make_batch(batch)[0][:, 0].tolist()]


@pytest.mark.parametrize("workers", [0, 2])
def test_indices_are_drawn_from_the_seed_and_others_on_each_rank(built, workers):
    text = f"DataLoader(Rows(1000), batch_size=3, num_workers={workers})"
    seeds = ((0, 0), (0, 0), (0, 1), (1, 0))
    first, again, *others = (places(built(text, seed=seed, rank=rank), 8) for seed, rank in seeds)
    assert first == again and len(first) == 16
    assert first not in others and first != sorted(first)


def test_the_users_settings_stay_but_for_the_batch(built):
    made = built(
        "DataLoader(Rows(50), batch_size=3, num_workers=2, prefetch_factor=5, timeout=7,"
        " persistent_workers=True, generator=torch.Generator(), collate_fn=lambda rows:"
        " (torch.stack([one for one, _ in rows]) + 1000, torch.zeros(len(rows), 1)))"
    )
    assert min(places(made, 4)) >= 1000
    rebuilt, given = made.loader._rebuilt, made.loader.given
    for name in ("num_workers", "prefetch_factor", "persistent_workers", "timeout", "generator"):
        assert getattr(rebuilt, name) == getattr(given, name)
    assert rebuilt.batch_size == 4 and made.make_batch(6)[0].shape == (6, 4)


@pytest.mark.parametrize("timeout", [0, 600])
def test_the_wait_for_a_batch_is_shorter_than_a_collective(built, timeout):
    made = built(f"DataLoader(Rows(50), batch_size=3, num_workers=1, timeout={timeout})")
    made.make_batch(4)
    assert 30.0 <= made.loader._rebuilt.timeout <= Plan.timeout_s - 10.0


def test_a_stream_begins_again_and_leaves_out_what_fills_no_batch(built):
    made = built("DataLoader(Stream(10), batch_size=3)")
    assert places(made, 4, batches=3) == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]


@pytest.mark.parametrize(
    "loader",
    [
        "DataLoader(Rows(5), batch_size=2)",
        "DataLoader(Stream(7), num_workers=2)",
        "DataLoader(Rows(50), collate_fn=five)",
        "DataLoader(Rows(50), batch_size=None)",
        "Own(Rows(50))",
        "DataLoader(Dying(50), num_workers=1)",
        "DataLoader(Hanging(50), num_workers=1, timeout=1)",
        "DataLoader(Broken(50), num_workers=2)",
        "DataLoader(Broken(50))",
    ],
)
def test_a_wrong_loader_is_explained_in_a_line_and_is_no_lost_peer(built, loader):
    with pytest.raises((LoaderError, ValueError, TypeError, RuntimeError)) as raised:
        try_once(built(loader), 8)
    words = explain(raised.value, FILE)
    number = 1 + TEXT.splitlines().index('        raise ValueError("not a number")')
    where = f" (mine.py, line {number}, in __getitem__)"
    assert "\n" not in words and words.endswith(where) is ("Broken" in loader)
    assert not lost_peer(raised.value)


def workers_of(made):
    return [process.pid for process in made.loader.processes]


def state(process):
    """R, S, T (stopped) and so on [proc(5)]; empty after the end."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def reach(workers, states):
    """Whether all workers are in one of `states` within five seconds."""
    until = time.monotonic() + 5
    while {state(worker) for worker in workers} - states and time.monotonic() < until:
        time.sleep(0.01)
    return not {state(worker) for worker in workers} - states


def test_workers_stand_still_between_measurements_and_end(built):
    made = built("DataLoader(Rows(50), batch_size=2, num_workers=2)")
    for _ in range(2):
        with running_workers(made.loader):
            made.make_batch(4)
        assert len(workers_of(made)) == 2
    workers = workers_of(made)
    assert reach(workers, {"T"})
    made.close()
    assert [state(worker) for worker in workers] == ["", ""] and not workers_of(made)


def test_no_death_of_a_worker_interrupts_the_report_of_an_error():
    def interrupt(*_):
        raise RuntimeError

    before = signal.signal(signal.SIGCHLD, interrupt)
    try:
        with worker_deaths_ignored():
            os.kill(os.getpid(), signal.SIGCHLD)
        with pytest.raises(RuntimeError):
            os.kill(os.getpid(), signal.SIGCHLD)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_workers_return_batches_however_long_their_folders_path_is(built, tmp_path, monkeypatch):
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
from tasks.node.entrypoint import build
from tasks.node.precision import Arithmetic
from tests.tasks.node.test_loader import FILE, replace

file = replace(FILE, arguments={"loader": "DataLoader(Hanging(50), num_workers=2)"})
made = build(Path(sys.argv[1]), file, seed=0, rank=0, computing=Arithmetic())
made.loader._iterator = iter(made.loader._rebuild(4))
time.sleep(0.5)
print(*[one.pid for one in made.loader.processes], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.local
def test_workers_end_with_their_rank_however_that_ends(built):
    here = {**os.environ, "PYTHONPATH": str(Path(processes.__file__).parents[2])}
    printed = built.folder / "printed"
    with printed.open("w") as out:  # a pipe would stay open in workers that live on
        ended = subprocess.run(
            [sys.executable, "-c", RANK, str(built.folder)], env=here, stdout=out, timeout=60
        )
    workers = [int(pid) for pid in printed.read_text().split()]
    assert ended.returncode == -signal.SIGKILL and len(workers) == 2
    are_gone = reach(workers, {"", "Z"})  # torch alone looks every five seconds
    for pid in workers if not are_gone else ():
        os.kill(pid, signal.SIGKILL)
    assert are_gone


def test_a_profile_measures_what_a_sample_costs_without_workers(built, monkeypatch):
    made = built("DataLoader(Slow(50), batch_size=2, num_workers=3)")
    item = Item(run_id="p", kind="profile", nodes=[0], batches=[2, 4])
    try_once(made, 2)
    assert len(workers_of(made)) == 3
    monkeypatch.setattr(profiler, "_buckets", lambda *_: [])
    monkeypatch.setattr(profiler, "_BATCH_S", 0.01)
    values = profiler.profile(item, made, None, Patience())
    assert values["loader_workers"] == 3 and not workers_of(made)
    assert 0.01 <= values["load_s"] < 0.02 and values["load_wait_s"] >= 0
    assert [row["batch"] for row in values["rows"]] == [2, 4]
    assert all(row["input_s"] >= 0.01 * row["batch"] for row in values["rows"])


def test_waiting_is_told_from_computing(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(300_000))
    before = profiler.thread_counters()
    time.sleep(0.2)
    file.read_bytes()
    load_s, wait_s = profiler._loading_seconds(before, 2)
    assert load_s < 0.05 < wait_s


QUICK = Item(
    run_id="r", kind="train", nodes=[0], batches=[8], warmup_steps=1, least_steps=4, most_steps=4
)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_wait_for_a_batch_is_a_part_of_the_step(built, workers):
    made = built(f"DataLoader(Slow(50), batch_size=2, num_workers={workers})")
    values = train(QUICK, made, None, Patience())
    assert values["loader_workers"] == workers and values["sync_s"] == 0.0
    ahead = 6 * workers  # of 32 samples: two batches in stock, and one under way
    assert values["step_s"] > 0.08 * (1 - ahead / 32)
    assert 0.7 < values["input_s"] / values["step_s"] < 1
    assert len(workers_of(made)) == workers and reach(workers_of(made), {"T"})


def test_steps_are_measured_over_whole_rounds_of_the_workers(built):
    values = train(QUICK, built("DataLoader(Rows(50), num_workers=3)"), None, Patience())
    assert values["steps"] % 3 == 0 and values["steps"] >= 4
