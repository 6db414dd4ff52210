"""When a measurement stops, and what a host takes away: measured again while patience lasts, and reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.monitoring.slow_runs import TAKEN
from tasks.node import measuring, probe, profiler, reference, steps
from tasks.node.entrypoint import LoadedWorkload
from tasks.node.measuring import DISTURBED, Patience, processor_ticks
from tasks.node.precision import Arithmetic
from tasks.node.record import Item

SECONDS = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=40)
BOUNDS = {"least": 8, "most": 30, "most_s": 8.0}


@given(SECONDS)
def test_spread_and_error_do_not_depend_on_the_order_or_the_unit(seconds: list[float]) -> None:
    milliseconds = [1000 * one for one in reversed(seconds)]
    assert measuring.spread(milliseconds) == pytest.approx(measuring.spread(seconds))
    assert measuring.median_error(milliseconds) == pytest.approx(measuring.median_error(seconds))


@given(SECONDS, st.floats(0, 7.9))
def test_a_run_has_its_least_steps_while_there_is_time_and_an_end_however_noisy(
    seconds: list[float], elapsed_s: float
) -> None:
    assert len(seconds) >= BOUNDS["least"] or not measuring.enough(
        seconds, elapsed_s=elapsed_s, **BOUNDS
    )
    assert measuring.enough(seconds, elapsed_s=8.0, **BOUNDS)
    assert measuring.enough(seconds, least=1, most=len(seconds), elapsed_s=0.0, most_s=8.0)
    block = measuring.next_block(seconds, least=8, most=len(seconds) + 3)
    assert 1 <= block <= 3


@pytest.mark.parametrize(
    ("seconds", "enough"),
    [
        ([], False),
        ([0.200, 0.201, 0.199, 0.200, 0.202, 0.200, 0.198, 0.200], True),
        ([0.200, 0.260, 0.180, 0.240, 0.210, 0.300, 0.190, 0.250], False),
        ([0.2] * 7 + [3.0], True),  # one hiccup
        (
            [0.212, 0.212, 0.212, 0.212, 0.211, 0.203, 0.202, 0.202, 0.202, 0.202],
            False,
        ),  # still warming up
    ],
)
def test_a_quiet_run_ends_at_the_least_steps_and_one_that_is_noisy_or_warms_up_goes_on(
    seconds: list[float], enough: bool
) -> None:
    assert measuring.enough(seconds, elapsed_s=2.0, **BOUNDS) is enough


@given(SECONDS)
def test_the_middle_half_leaves_out_as_much_above_as_below(seconds: list[float]) -> None:
    kept = measuring.central(seconds)
    ordered, cut = sorted(seconds), len(seconds) // 4
    assert sorted(seconds[i] for i in kept) == ordered[cut : len(seconds) - cut]


def test_spread_and_slowest_by_hand() -> None:
    assert (
        measuring.spread([5.0, 1.0, 2.0, 4.0, 3.0]) == pytest.approx(2 / 3)
        and measuring.spread([7.0]) == 0.0
    )
    assert measuring.slowest([[1.0, 2.0, 3.0], [2.0, 1.0, 4.0]]) == [2.0, 2.0, 4.0]


class Host:
    """A machine's /proc/stat: what is wanted and what is taken away of it is said by a test."""

    def __init__(self, stat: Path) -> None:
        self.stat, self.ran, self.taken = stat, 1000, 0
        self.runs(0)

    def runs(self, ticks: int, taken: int = 0) -> None:
        self.ran, self.taken = self.ran + ticks, self.taken + taken
        self.stat.write_text(
            f"cpu  {self.ran} 0 0 777 88 0 0 {self.taken} 5 5\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
        )


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(measuring, "_STAT", tmp_path / "stat")
    return Host(tmp_path / "stat")


def measurement(host: Host, clock: Any, *taken: int) -> Callable[[], int]:
    """Returns 0, 1, ...: the first time with so many of a hundred ticks taken away, and so on, ten seconds each."""
    times = iter(enumerate(taken))

    def measure() -> int:
        number, away = next(times)
        host.runs(100 - away, away)
        clock.now += 10.0
        return number

    return measure


def test_what_was_disturbed_is_measured_again(host: Host, clock: Any) -> None:
    patient = Patience(left_s=60.0)
    assert patient.undisturbed(measurement(host, clock, 90, 10, 9, 0), None) == 2
    assert patient.left_s == 40.0, "what is kept costs no patience"
    assert patient.taken_share == pytest.approx(0.09)
    assert DISTURBED == TAKEN, "what is measured again here is what a slow run's cause is there"


def test_what_is_not_disturbed_is_measured_once_without_patience_too(
    host: Host, clock: Any
) -> None:
    assert Patience().undisturbed(measurement(host, clock, 0, 0), None) == 0
    assert Patience().undisturbed(measurement(host, clock, 90, 0), None) == 0
    patient = Patience(left_s=60.0)

    def short() -> None:
        host.runs(9, 9)
        clock.now += 10.0

    patient.undisturbed(short, None)  # 18 ticks are too few to say anything
    assert patient.left_s == 60.0


def test_patience_ends_and_what_is_kept_then_says_how_much_was_taken(
    host: Host, clock: Any
) -> None:
    patient = Patience(left_s=15.0)
    assert patient.undisturbed(measurement(host, clock, 80, 80, 70, 60), None) == 2
    assert patient.taken_share == pytest.approx(0.7) and patient.left_s <= 0
    assert patient.undisturbed(measurement(host, clock, 20, 20), None) == 0
    assert patient.taken_share == pytest.approx(0.45), "of all that was kept of the item"
    patient.reset()
    assert patient.taken_share == 0.0


@pytest.mark.parametrize(("own_s", "others_s"), [(45.0, 100.0), (100.0, 45.0)])
def test_ranks_repeat_together_and_as_long_as_the_least_patient(
    own_s: float, others_s: float, host: Host, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the other machine: ticks taken, wanted, seconds, patience left, seconds of the fixed work
    others = iter([[50.0, 100.0, 30.0, others_s - 30.0 * turn, 0.02] for turn in range(9)])
    monkeypatch.setattr(measuring, "gather", lambda mine, _group: [list(mine), next(others)])
    patient = Patience(left_s=own_s)
    assert patient.undisturbed(measurement(host, clock, 0, 0, 0, 0, 0, 0), None) == 2, (
        "disturbed on the other machine"
    )
    assert patient.left_s == -15.0, "the time of the slowest of them, from the least patience"
    assert patient.taken_share == pytest.approx(0.5)


def test_short_measurements_are_judged_by_whoever_had_most_taken_away(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        measuring, "gather", lambda mine, _group: [list(mine), [8.0, 12.0, 1.0, 60.0, 0.02]]
    )
    patient = Patience(left_s=60.0)
    for _ in range(3):  # each alone of too few ticks to say anything
        patient.undisturbed(lambda: host.runs(12), None)
    assert patient.taken_share == pytest.approx(8 / 12)


class Fixed:
    """The fixed work: its seconds one after the other, in the order in which it is done."""

    def __init__(self, *seconds: float) -> None:
        self.left = list(seconds)

    def seconds(self) -> float:
        return self.left.pop(0)


def test_fixed_work_is_done_before_and_after_each_block_and_reported_of_those_kept(
    host: Host, clock: Any
) -> None:
    work: Any = Fixed(9.0, 9.0, 1.0, 3.0, 2.0, 4.0, 4.0, 4.0)  # before and after each block
    patient = Patience(left_s=60.0, reference=work)
    assert patient.undisturbed(measurement(host, clock, 90, 0), None) == 1
    for _ in range(2):
        patient.undisturbed(measurement(host, clock, 0), None)
    values = patient.reference_values([1])
    spread = pytest.approx(1 / 3)
    assert values == {"reference_s": [3.0], "reference_blocks": 3, "reference_spread": spread}, (
        "of the blocks kept"
    )
    assert patient.left_s == 50.0, "fixed work costs no patience"
    patient.reset()
    assert patient.reference_values([1]) == {} and Patience().reference_values([1]) == {}


def test_fixed_work_is_reported_of_the_slowest_device_of_each_machine(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [[0.0, 0.0, 1.0, 60.0, one] for one in (5.0, 0.5)]
    monkeypatch.setattr(measuring, "gather", lambda mine, _group: [list(mine), *others])
    work: Any = Fixed(2.0, 2.0)
    patient = Patience(reference=work)
    patient.undisturbed(lambda: None, None)
    assert patient.reference_values([2, 1])["reference_s"] == [5.0, 0.5]
    others[1][4] = 0.0  # one that does none
    patient.references.append([2.0, 5.0, 0.0])
    assert patient.reference_values([2, 1]) == {}


def test_fixed_work_is_the_same_whatever_a_workload_has_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = reference.Reference.on(torch.device("cpu"))
    seen: list[tuple[int, str, bool]] = []

    def once(_self: object) -> None:
        seen.append(
            (torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.is_grad_enabled())
        )

    monkeypatch.setattr(reference.Reference, "_once", once)
    monkeypatch.setattr(reference, "now", lambda _device: float(len(seen)))
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    torch.set_float32_matmul_precision("medium")
    try:
        assert work.seconds() == 1.0 and seen == [(threads, "highest", False)] * 2, (
            "the first time does not count"
        )
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (
            threads + 1,
            "medium",
        )
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")


def test_fixed_work_is_repeated_until_a_quota_does_not_show(
    monkeypatch: pytest.MonkeyPatch, clock: Any
) -> None:
    work = reference.Reference.on(torch.device("cpu"))
    monkeypatch.setattr(reference, "now", lambda _device: clock.time())
    for each_s, times in ((0.02, 3), (0.3, 1), (0.0, 100)):
        done: list[object] = []

        def once(_self: object, each_s: float = each_s, done: list[object] = done) -> None:
            done.append(1)
            clock.now += each_s

        monkeypatch.setattr(reference.Reference, "_once", once)
        assert work.seconds() == pytest.approx(each_s) and len(done) == times + 1


@pytest.mark.parametrize("text", [None, "", "cpu 1 2 3", "no processors here at all, none at all"])
def test_a_kernel_that_does_not_tell_takes_nothing(text: str | None, host: Host) -> None:
    if text is None:
        host.stat.unlink()
    else:
        host.stat.write_text(text)
    assert processor_ticks() == (0.0, 0.0)
    patient = Patience(left_s=60.0)
    assert patient.undisturbed(lambda: 7, None) == 7 and patient.taken_share == 0.0


def test_a_disturbed_block_trains_but_is_not_measured(host: Host, clock: Any) -> None:
    taken = iter([*[90] * 4, *[0] * 100])

    def step(*, sync: bool) -> float:
        away = next(taken)
        host.runs(100 - away, away)
        clock.now += 1.0 if away == 0 else 5.0
        return float(sync)

    item = Item(
        run_id="r", kind="train", nodes=[0], batches=[1], least_steps=8, most_steps=20, most_s=30.0
    )
    timed = steps.TimedSteps(
        step=step, group=None, clock_s=clock.time, patience=Patience(left_s=60.0)
    )
    assert timed.until_steady(item) == [steps.Timed(8.0, [1.0] * 8, [0.0] * 8)], (
        "a disturbed block is no time of it"
    )
    assert len(timed.losses) == 12


def test_a_run_that_diverges_only_because_it_was_repeated_is_measured(
    host: Host, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps_taken = [0]

    def step(*_: Any, **__: Any) -> float:
        steps_taken[0] += 1
        away = 90 if steps_taken[0] < 40 else 0
        host.runs(100 - away, away)
        clock.now += 1.0
        return 1.0 if steps_taken[0] <= 22 else float("nan")

    monkeypatch.setattr(steps, "one_step", step)
    model = steps.torch.nn.Linear(1, 1)
    built = LoadedWorkload(
        model=model,
        loss=len,
        make_batch=len,
        optimizer=torch.optim.SGD(model.parameters()),
        arithmetic=Arithmetic(),
    )  # type: ignore[call-arg, arg-type]
    monkeypatch.setattr(steps, "now", lambda _device: float(steps_taken[0]))
    monkeypatch.setattr(steps, "peak_bytes", lambda _device: 1)
    item = Item(
        run_id="r", kind="train", nodes=[0], batches=[1], least_steps=8, most_steps=20, most_s=30.0
    )
    values, problem = steps.train(item, built, None, Patience(left_s=1000.0), place=0)
    assert problem == "" and values["last_loss"] == 1.0 and steps_taken[0] > 40


@pytest.mark.parametrize("what", ["without communication", "probe", "profile"])
def test_whatever_is_measured_waits(what: str, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []

    class Waiting(Patience):
        def undisturbed(self, measure: Callable[[], Any], group: Any) -> Any:
            waited.append(group)
            return super().undisturbed(measure, group)

    group: Any = object()
    monkeypatch.setattr(measuring, "gather", lambda mine, _group: [list(mine)])
    item = Item(run_id="r", kind="train", nodes=[0, 1], batches=[8, 16], message_bytes=[1024, 2048])
    if what == "without communication":
        monkeypatch.setattr(steps, "gather", lambda mine, _group: [list(mine)])
        monkeypatch.setattr(steps, "meet", lambda _group: None)
        timed = steps.TimedSteps(
            step=lambda sync: 0.0,
            group=group,
            clock_s=iter(range(100)).__next__,
            patience=Waiting(),
        )
        assert timed.block(2, sync=False) == [steps.Timed(5, [1, 1], [0, 0])] and timed.losses == []
        assert waited == [group]
    elif what == "probe":
        monkeypatch.setattr(probe, "_all_reduce_s", lambda *_, repeats: [0.1] * repeats)
        values, _ = probe.probe(item, group, probe.torch.device("cpu"), Waiting())
        assert waited == [group] * 2 and [row["bytes"] for row in values["rows"]] == [1024, 2048]
    else:
        monkeypatch.setattr(profiler, "_parts", lambda _built, batch: {"batch": batch})
        monkeypatch.setattr(profiler, "_flops", lambda *_: 1.0)
        monkeypatch.setattr(profiler, "_buckets", lambda *_: [])
        monkeypatch.setattr(profiler, "_divided", lambda *_: {})
        built: Any = type("Built", (), {"parameters": 1, "gradient_bytes": 4, "loader": None})()
        values, _ = profiler.profile(item, built, group, Waiting())
        assert waited == [None] * 2 and [row["batch"] for row in values["rows"]] == [8, 16]
