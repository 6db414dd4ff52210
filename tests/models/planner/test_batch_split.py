"""Splits add up, finish together and fit in memory."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.domain.workload import Mode
from models.planner.batch_split import finish_together, global_batches, splits_of
from models.step_time.memory import Needs
from tests.models.planning import machine, offer, workload

LINE = st.tuples(st.floats(0.0, 0.2), st.floats(1e-4, 0.5))


def finish_s(lines, batches):
    return max(a + k * batch for (a, k), batch in zip(lines, batches, strict=True))


@given(lines=st.lists(LINE, min_size=2, max_size=3), total=st.integers(2, 14))
def test_no_whole_split_finishes_earlier(lines, total):
    shares = finish_together(lines, total, [1] * len(lines))
    if shares is None:
        return
    splits = (s for s in product(range(1, total + 1), repeat=len(lines)) if sum(s) == total)
    best = min(finish_s(lines, split) for split in splits)
    assert finish_s(lines, shares) <= best * (1 + 1e-6)


@pytest.mark.parametrize(
    ("lines", "total", "devices", "shares"),
    [
        ([(0.1, 0.01)] * 3, 64, (1, 1, 1), (22, 21, 21)),  # the first get the odd samples
        ([(0.0, 0.001), (5.0, 0.001)], 64, (1, 1), None),  # the second would get nothing
        ([(0.0, 0.01)] * 2, 60, (4, 1), (12, 12)),
        ([(0.0, 0.01)] * 2, 256, (1, 8), (24, 29)),  # eight devices cannot share the last four
    ],
)
def test_shares_by_hand(lines, total, devices, shares):
    assert finish_together(lines, total, devices) == shares


def test_a_range_of_batches_is_walked_by_doubling():
    assert global_batches(96, 384) == (96, 192, 384)
    assert global_batches(100, 250) == (100, 200, 250)


TYPES = [machine("large"), machine("small", devices=4), machine("whole", devices=2)]
OFFERS = {kind.name: offer(kind.name, instance_type=kind) for kind in TYPES}
PACES = {"large": (0.01, 0.002), "small": (0.005, 0.004), "whole": (0.02, 0.001)}


@dataclass
class Lines:
    """The step model as splits use it."""

    needed: Callable  # of a type's name: bytes of a sample, and bytes beside
    accumulated: float = 1.0  # times as many bytes of a sample

    def compute_lines(self, workload, types, mode):
        return [PACES[name] for name in types]

    @property
    def memory(self):
        return self

    def needs(self, workload, mode, name, ranks, *, accumulates):
        sample, fixed = (each / (ranks if mode.sharded else 1) for each in self.needed(name))
        return Needs(fixed, 0.0, sample * self.accumulated**accumulates, [])


def splits(counts, total, memory=lambda name: (math.nan, 0.0), strategy="ddp", **more):
    job = replace(workload("w", total), modes=(Mode(strategy=strategy),))
    model = Lines(memory, **more)
    return splits_of(job, TYPES, np.array(counts), totals=[total], model=model)


def test_accumulation_makes_a_batch_fit_in_the_fewest_steps():
    found = splits([[1, 0, 0], [4, 0, 0]], 96, lambda name: (2**31 / 5, 0))
    steps = set(zip(found.cluster.tolist(), found.steps.tolist(), strict=True))
    assert steps == {(0, 24), (1, 6)}  # five samples a device: 96 / 24 = 4 and 96 / (6 x 4) = 4
    assert all(found.setup(at, OFFERS).global_batch == 96 for at in range(len(found)))
    some = splits(
        [[1, 0, 0], [0, 0, 1]],
        96,
        lambda name: (math.nan if name == "whole" else 2**31 / 24, 0),
    )
    steps = zip(some.cluster.tolist(), some.steps.tolist(), strict=True)
    assert list(steps) == [(0, 4), (1, 1), (1, 2), (1, 4)]
    assert splits([[1, 0, 0]], 10**12).steps.tolist() == [1, 2, 4]  # without a walk up to 10**12


def test_accumulation_needs_more_memory():
    found = splits([[1, 0, 0]], 48, lambda name: (2.0**31 / 12, 0), accumulated=12 / 11)
    assert found.steps.tolist() == [6]  # eight samples: twelve fit without accumulation only


def test_devices_that_combine_their_own_steps_have_equal_batches():
    counts = [[2, 0, 0], [2, 0, 1], [0, 2, 0], [1, 0, 1]]  # 2, 4 and 8 devices, and 3
    for total, equal in ((96, {0, 2}), (97, set())):
        assert set(splits(counts, total, strategy="adasum").cluster.tolist()) == {0, 1} | equal
        found = splits(counts, total, strategy="adasum-delta")
        assert set(found.cluster.tolist()) == equal


def test_memory_is_that_of_the_device_and_not_of_the_host():
    gib = TYPES[0].device_memory_gib * 2**30
    assert TYPES[0].memory_gib > 2 * TYPES[0].device_memory_gib
    just, over = (
        splits([[1, 0, 0]], 96, lambda name, most=most: (gib / most, 0)) for most in (96, 95)
    )
    assert just.samples.tolist()[0] == [96] and max(over.samples.tolist()) <= [95]
    assert len(splits([[1, 0, 0]], 96, lambda name: (0, 2.0**40))) == 0
    counts = [[1, 0, 0], [2, 0, 0], [3, 0, 0]]
    for strategy, fitting in (("ddp", set()), ("fsdp", {1, 2})):
        found = splits(counts, 96, lambda name: (0, 2 * gib), strategy=strategy)
        assert set(found.cluster.tolist()) == fitting
