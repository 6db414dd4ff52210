"""When a measurement stops, and how it repeats what the host disturbed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.monitoring.slow_runs import TAKEN
from tasks.node import reference, repetition
from tasks.node.repetition import Patience

SECONDS = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=40)
BOUNDS = {"least": 8, "most": 30}


@given(SECONDS, st.floats(0.1, 8))
def test_a_run_has_its_least_steps_while_there_is_time_and_an_end_however_noisy(seconds, left_s):
    assert len(seconds) >= 8 or repetition.next_block(seconds, left_s=left_s, **BOUNDS)
    assert not repetition.next_block(seconds, left_s=0.0, **BOUNDS)
    assert not repetition.next_block(seconds, least=1, most=len(seconds), left_s=8.0)
    assert 1 <= repetition.next_block(seconds, least=99, most=len(seconds) + 3, left_s=8.0) <= 3


@pytest.mark.parametrize(
    ("seconds", "enough"),
    [
        ([], False),
        ([0.200, 0.201, 0.199, 0.200, 0.202, 0.200, 0.198, 0.200], True),
        ([0.200, 0.260, 0.180, 0.240, 0.210, 0.300, 0.190, 0.250], False),
        ([0.2] * 7 + [3.0], True),
        ([0.212] * 4 + [0.211, 0.203] + [0.202] * 4, False),  # it still warms up
    ],
)
def test_a_steady_run_ends_and_a_noisy_one_goes_on(seconds, enough):
    assert (repetition.next_block(seconds, left_s=6.0, **BOUNDS) == 0) is enough


def test_spread_by_hand():
    assert repetition.spread([5.0, 1.0, 2.0, 4.0, 3.0]) == pytest.approx(2 / 3)
    assert repetition.spread([7.0]) == 0.0 and repetition.DISTURBED == TAKEN


class Host:
    """A machine's /proc/stat, whose ticks a test sets."""

    def __init__(self, stat):
        self.stat, self.ran, self.taken = stat, 1000, 0
        self.runs(0)

    def runs(self, ticks, taken=0):
        self.ran, self.taken = self.ran + ticks, self.taken + taken
        self.stat.write_text(f"cpu  {self.ran} 0 0 777 88 0 0 {self.taken} 5 5\ncpu0 1 1\n")


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setattr(repetition, "_STAT", tmp_path / "stat")
    return Host(tmp_path / "stat")


def blocks(host, clock, *taken):
    """Returns 0, 1, ... after ten seconds each, with so many of a hundred ticks stolen."""
    times = iter(enumerate(taken))

    def measure():
        number, away = next(times)
        host.runs(100 - away, away)
        clock.now += 10.0
        return number

    return measure


@pytest.mark.parametrize(
    ("left_s", "taken", "kept", "share", "left_after_s"),
    [
        (60.0, (90, 10, 9, 0), 2, 0.09, 40.0),
        (0.0, (90, 0), 0, 0.9, 0.0),
        (15.0, (80, 80, 70, 60), 2, 0.7, -5.0),
    ],
)
def test_a_disturbed_measurement_is_repeated_while_patience_lasts(
    host, clock, left_s, taken, kept, share, left_after_s
):
    patient = Patience(left_s=left_s)
    assert patient.repeat_if_disturbed(blocks(host, clock, *taken), None) == kept
    assert patient.taken_share == pytest.approx(share) and patient.left_s == left_after_s
    patient.left_s = 60.0
    patient.reset()
    patient.repeat_if_disturbed(lambda: host.runs(9, 9), None)  # few ticks say nothing
    assert patient.left_s == 60.0 and patient.taken_share == 0.0


def test_ranks_repeat_together_for_the_least_patience_and_the_most_disturbed_machine_counts(
    host, clock, monkeypatch
):
    # the other machine: ticks stolen, wanted, seconds, patience left, seconds of the fixed work
    others = iter([[50.0, 80.0, 30.0, 45.0 - 30.0 * turn, 0.02] for turn in range(9)])
    monkeypatch.setattr(repetition, "of_ranks", lambda mine, _group: [list(mine), next(others)])
    patient = Patience(left_s=100.0)
    assert patient.repeat_if_disturbed(blocks(host, clock, *[0] * 6), None) == 2
    assert patient.left_s == -15.0 and patient.taken_share == pytest.approx(50 / 80)


class Fixed:
    """Fixed work with given seconds."""

    def __init__(self, *seconds):
        self.left = list(seconds)

    def seconds(self):
        return self.left.pop(0)


def test_fixed_work_is_reported_of_kept_blocks(host, clock):
    work = Fixed(9.0, 9.0, 1.0, 3.0, 2.0, 4.0, 4.0, 4.0)  # before and after each block
    patient = Patience(left_s=60.0, reference=work)
    assert patient.repeat_if_disturbed(blocks(host, clock, 90, 0), None) == 1
    for _ in range(2):
        patient.repeat_if_disturbed(blocks(host, clock, 0), None)
    spread = pytest.approx(1 / 3)
    values = {"reference_s": [3.0], "reference_blocks": 3, "reference_spread": spread}
    assert patient.reference_values([1]) == values
    patient = Patience(references=[[2.0, 5.0, 0.5]])
    assert patient.reference_values([2, 1])["reference_s"] == [5.0, 0.5]


def test_fixed_work_ignores_what_a_workload_has_set(monkeypatch):
    work = reference.Reference(torch.device("cpu"))
    seen = []

    def once(_self):
        seen.append((torch.get_num_threads(), torch.get_float32_matmul_precision()))

    monkeypatch.setattr(reference.Reference, "_once", once)
    monkeypatch.setattr(reference, "now", lambda _device: float(len(seen)))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    torch.set_float32_matmul_precision("medium")
    try:
        assert work.seconds() == 1.0 and seen == [(threads, "highest")] * 2
        assert torch.get_num_threads() == threads + 1
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")
