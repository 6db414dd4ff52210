"""Splits sum exactly, finish together, no sample is better placed elsewhere; in more steps only where memory lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.domain.workload import Mode
from models.planner.batch_split import BatchSplits, finish_together, global_batches, splits_of
from models.step_time.setup_arrays import read_setups
from tests.models.planning import frame, machine, offer, workload

PLAIN = Mode()


def finish_s(lines: Sequence[tuple[float, float]], batches: Sequence[int]) -> float:
    """Seconds until the slowest machine is done with its share."""
    return max(a + k * batch for (a, k), batch in zip(lines, batches, strict=True))


LINE = st.tuples(st.floats(0.0, 0.2), st.floats(1e-4, 0.5))
LINES = st.lists(LINE, min_size=1, max_size=6)


@given(lines=LINES, total=st.integers(1, 2000))
def test_shares_sum_exactly_and_no_single_sample_is_better_elsewhere(
    lines: list[tuple[float, float]], total: int
) -> None:
    shares = finish_together(lines, total)
    if shares is None:
        return
    assert sum(shares) == total and min(shares) >= 1
    finish = finish_s(lines, shares)
    for giver, taker in permutations(range(len(lines)), 2):
        moved = list(shares)
        moved[giver] -= 1
        moved[taker] += 1
        if moved[giver] >= 1:
            assert finish_s(lines, moved) >= finish * (1 - 1e-6)


@given(lines=st.lists(LINE, min_size=2, max_size=3), total=st.integers(2, 14))
def test_no_whole_split_at_all_finishes_earlier(
    lines: list[tuple[float, float]], total: int
) -> None:
    shares = finish_together(lines, total)
    if shares is None:
        return
    all_splits = (s for s in product(range(1, total + 1), repeat=len(lines)) if sum(s) == total)
    assert finish_s(lines, shares) <= min(finish_s(lines, split) for split in all_splits) * (
        1 + 1e-6
    )


@given(lines=LINES, total=st.integers(1, 500))
def test_a_cluster_is_dropped_only_if_it_is_dominated(
    lines: list[tuple[float, float]], total: int
) -> None:
    """Where a machine idles, the others alone finish no later than they would with it at one sample."""
    if finish_together(lines, total) is not None or total < len(lines):
        return
    tau = (total + sum(a / k for a, k in lines)) / sum(1 / k for _, k in lines)
    idle = min(range(len(lines)), key=lambda i: (tau - lines[i][0]) / lines[i][1])
    assert lines[idle][0] + lines[idle][1] * 1 >= tau * (1 - 1e-6)


@pytest.mark.parametrize(
    ("lines", "total", "devices", "shares"),
    [
        ([(0.1, 0.01)] * 4, 64, None, (16, 16, 16, 16)),
        ([(0.1, 0.01)] * 3, 64, None, (22, 21, 21)),  # the first get the odd samples
        ([(0.0, 0.01), (0.0, 0.02)], 48, None, (32, 16)),  # twice as fast, twice the samples
        ([(0.0, 0.01), (0.1, 0.01)], 50, None, (30, 20)),  # a slow start is paid for
        ([(0.0, 0.001), (5.0, 0.001)], 64, None, None),  # the second would get nothing
        ([(0.0, 0.01)] * 3, 2, None, None),
        ([(0.0, 0.01)] * 2, 60, (4, 1), (12, 12)),
        ([(0.0, 0.01)], 30, (4,), None),
        ([(0.0, 0.01)], 30, (0,), None),
        ([(0.0, 0.01)] * 2, 30, (0, 1), None),
    ],
)
def test_shares_by_hand(
    lines: list[tuple[float, float]],
    total: int,
    devices: tuple[int, ...] | None,
    shares: tuple[int, ...] | None,
) -> None:
    assert finish_together(lines, total, devices) == shares


@given(lines=st.lists(LINE, min_size=2, max_size=4), total=st.integers(8, 400), data=st.data())
def test_shares_of_several_devices_sum_exactly(
    lines: list[tuple[float, float]], total: int, data: st.DataObject
) -> None:
    devices = data.draw(
        st.lists(st.sampled_from([1, 2, 4]), min_size=len(lines), max_size=len(lines))
    )
    shares = finish_together(lines, total, devices)
    assert shares is None or sum(d * b for d, b in zip(devices, shares, strict=True)) == total


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError):
        finish_together([(0.0, 1.0)], 4, devices=(1, 1))


def test_a_range_of_batches_is_walked_by_doubling() -> None:
    assert global_batches(96, 384) == (96, 192, 384)
    assert global_batches(100, 250) == (100, 200, 250)
    assert global_batches(64, 64) == (64,)
    with pytest.raises(ValueError):
        global_batches(10, 5)


TYPES = [machine("large"), machine("small", devices=4), machine("whole", devices=2)]
OFFERS = {one.name: offer(one.name, instance_type=one) for one in TYPES}
PACES = {"large": (0.01, 0.002), "small": (0.005, 0.004), "whole": (0.02, 0.001)}


@dataclass
class Lines:
    """The parts of a step model that splits ask for."""

    lines: dict[str, tuple[float, float]]
    peak: Callable[[str, int], float]

    def compute_line(
        self, workload: str, instance_type: str, mode: Mode = PLAIN
    ) -> tuple[float, float]:
        return self.lines[instance_type]

    def peak_bytes(
        self,
        workload: str,
        instance_type: str,
        batch: int,
        ranks: int = 1,
        *,
        mode: Mode = PLAIN,
        accumulates: bool = False,
    ) -> float:
        return self.peak(instance_type, batch)


def splits(
    counts: list[list[int]],
    total: int,
    peak: Callable[[str, int], float] = lambda name, batch: math.nan,
    lines: dict[str, tuple[float, float]] = PACES,
    strategy: str = "ddp",
) -> BatchSplits:
    wholes, model = np.array(counts, dtype=np.int64), Lines(lines, peak)
    job = replace(workload("w", total), modes=(Mode(strategy=strategy),))
    return splits_of(job, TYPES, wholes, totals=[total], model=model)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    count=st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any),
    total=st.integers(1, 600),
    paces=st.lists(st.floats(1e-4, 0.05), min_size=3, max_size=3),
)
def test_machines_taken_together_share_as_they_do_one_by_one(
    count: list[int], total: int, paces: list[float]
) -> None:
    lines = {one.name: (0.01, pace) for one, pace in zip(TYPES, paces, strict=True)}
    found = splits([count], total, lines=lines)
    members = [one for one, many in zip(TYPES, count, strict=True) for _ in range(many)]
    alone = finish_together(
        [lines[one.name] for one in members], total, [one.devices for one in members]
    )
    if not len(found) or found.steps[0] > 1:
        return
    setup = found.setup(0, OFFERS)
    assert setup.global_batch == total and min(setup.batch_per_device) >= 1
    assert [one.instance_type.name for one in setup.cluster.members] == [
        one.name for one in members
    ]
    if (
        alone is not None and len({one.devices for one in members}) == 1
    ):  # else a local optimum, in either way
        own = [lines[one.name] for one in members]
        assert finish_s(own, setup.batch_per_device) == pytest.approx(
            finish_s(own, alone), rel=1e-9
        )


def test_the_arrays_are_those_of_the_setup_machine_by_machine() -> None:
    found = splits([[2, 0, 3], [0, 1, 0], [1, 1, 1]], 96)
    read, planned = (
        read_setups(frame([found.setup(at, OFFERS) for at in range(len(found))]), {}),
        found.arrays(),
    )
    for name in ("ranks", "instances", "samples", "accumulation"):
        assert getattr(read, name).tolist() == getattr(planned, name).tolist()
    for at in range(len(found)):
        width = len(read.types[at])
        one_by_one = sorted(
            zip(read.types[at], read.layout[at, :width], read.batch[at, :width], strict=True)
        )
        columns = (planned.kind[at], planned.count[at], planned.layout[at], planned.batch[at])
        together = sorted(
            (planned.names[kind], devices, batch)
            for kind, many, devices, batch in zip(*columns, strict=True)
            for _ in range(int(many))
        )
        assert together == one_by_one


def test_a_batch_that_memory_lacks_for_is_accumulated_in_the_least_steps_that_fit() -> None:
    found = splits(
        [[1, 0, 0], [4, 0, 0]], 96, lambda name, batch: batch * 2**31 / 5
    )  # five samples a device
    steps = {(int(found.cluster[at]), int(found.steps[at])) for at in range(len(found))}
    assert steps == {
        (0, 24),
        (1, 6),
    }  # 96 / 24 = 4 and 96 / (6 x 4) = 4; 16 steps of one machine would need 6
    assert all(found.setup(at, OFFERS).global_batch == 96 for at in range(len(found)))


def test_where_some_of_the_usual_steps_fit_no_more_are_tried_and_unknown_memory_is_allowed() -> (
    None
):
    found = splits(
        [[1, 0, 0], [0, 0, 1]],
        96,
        lambda name, batch: math.nan if name == "whole" else batch * 2**31 / 24,
    )
    steps = zip(found.cluster.tolist(), found.steps.tolist(), strict=True)
    assert list(steps) == [(0, 4), (1, 1), (1, 2), (1, 4)]


def test_devices_whose_own_steps_are_combined_have_equal_batches_in_splits() -> None:
    counts = [[2, 0, 0], [2, 0, 1], [0, 2, 0], [1, 0, 1]]  # 2, 4 and 8 devices, and 3
    for total, equal in ((96, {0, 2}), (97, set())):
        assert set(splits(counts, total, strategy="adasum").cluster.tolist()) == {0, 1} | equal
        found = splits(counts, total, strategy="adasum-delta")
        assert set(found.cluster.tolist()) == equal
        assert all(
            len(set(found.setup(at, OFFERS).batch_per_device)) == 1 for at in range(len(found))
        )


def test_what_fits_the_host_and_not_the_device_makes_no_split() -> None:
    one = TYPES[0]
    assert one.memory_gib > 2 * one.device_memory_gib, "else this test says nothing"
    gib = one.device_memory_gib * 2**30
    just, over = (
        splits([[1, 0, 0]], 96, lambda name, batch, most=most: gib * batch / most)
        for most in (96, 95)
    )
    assert just.samples.tolist()[0] == [96] and max(over.samples.tolist()) <= [95]
    assert len(splits([[1, 0, 0]], 96, lambda name, batch: 2.0**40)) == 0
