"""How a batch is divided over many clusters at once: as over each alone, in more steps only where memory lacks."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.domain.cluster import Offer
from models.domain.setup_table import read_setups
from models.planner.batch_split import Shapes, finish_together, shapes_of
from models.planner.enumeration import compositions
from tests.models.planning import frame, machine, offer, workload

TYPES = [machine("large"), machine("small", devices=4), machine("whole", devices=2)]
OFFERS = {one.name: offer(one.name, instance_type=one) for one in TYPES}


def shapes(
    counts: list[list[int]],
    lines: dict[str, tuple[float, float]],
    total: int,
    peak: Callable[[str, int], float] | None = None,
    steps: tuple[int, ...] = (1, 2, 4),
) -> Shapes:
    return shapes_of(
        workload("w", total),
        TYPES,
        np.array(counts, dtype=np.int64),
        totals=[total],
        line=lines.__getitem__,
        peak_bytes=peak,
        accumulation=steps,
    )


def sold(name: str, count: int) -> list[Offer]:
    return [OFFERS[name]] * count


LINES = {"large": (0.01, 0.002), "small": (0.005, 0.004), "whole": (0.02, 0.001)}


@settings(max_examples=60, deadline=None)
@given(
    count=st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any),
    total=st.integers(1, 600),
    paces=st.lists(st.floats(1e-4, 0.05), min_size=3, max_size=3),
)
def test_machines_taken_together_share_as_they_do_one_by_one(count: list[int], total: int, paces: list[float]) -> None:
    lines = {one.name: (0.01, pace) for one, pace in zip(TYPES, paces, strict=True)}
    found = shapes([count], lines, total, steps=(1,))
    members = [one for one, many in zip(TYPES, count, strict=True) for _ in range(many)]
    alone = finish_together([lines[one.name] for one in members], total, [one.devices for one in members])
    if not len(found):
        return
    setup = found.setup(0, sold)
    assert setup.global_batch == total and min(setup.batch_per_device) >= 1
    assert [one.instance_type.name for one in setup.cluster.members] == [one.name for one in members]
    if alone is not None and len({one.devices for one in members}) == 1:  # else a local optimum, in either way
        ends = [
            max(lines[one.name][0] + lines[one.name][1] * batch for one, batch in zip(members, shares, strict=True))
            for shares in (setup.batch_per_device, alone)
        ]
        assert ends[0] == pytest.approx(ends[1], rel=1e-9)


def test_the_arrays_are_those_of_the_setup_machine_by_machine() -> None:
    found = shapes([[2, 0, 3], [0, 1, 0], [1, 1, 1]], LINES, 96)
    rows = [found.setup(at, sold) for at in range(len(found))]
    read, planned = read_setups(frame(rows), {}), found.arrays()
    for name in ("ranks", "instances", "samples"):
        assert getattr(read, name).tolist() == getattr(planned, name).tolist()
    assert planned.accumulation.tolist() == read.accumulation.tolist()
    for at in range(len(found)):
        width = len(read.types[at])
        one_by_one = sorted(zip(read.types[at], read.layout[at, :width], read.batch[at, :width], strict=True))
        together = sorted(
            (planned.names[kind], devices, batch)
            for kind, many, devices, batch in zip(
                planned.kind[at], planned.count[at], planned.layout[at], planned.batch[at], strict=True
            )
            for _ in range(int(many))
        )
        assert together == one_by_one


def test_a_batch_that_memory_lacks_for_is_accumulated_in_the_least_steps_that_fit() -> None:
    def peak(name: str, batch: int) -> float:
        return batch * 2**31 / 5  # five samples a device

    found = shapes([[1, 0, 0], [4, 0, 0]], LINES, 96, peak)
    steps = {(int(found.place[at]), int(found.steps[at])) for at in range(len(found))}
    assert steps == {(0, 24), (1, 6)}  # 96 / 24 = 4 and 96 / (6 x 4) = 4; 16 steps of one machine would need 6
    assert all(found.setup(at, sold).global_batch == 96 for at in range(len(found)))


def test_where_some_of_the_usual_steps_fit_no_more_are_tried_and_unknown_memory_is_allowed() -> None:
    def peak(name: str, batch: int) -> float:
        return math.nan if name == "whole" else batch * 2**31 / 24

    found = shapes([[1, 0, 0], [0, 0, 1]], LINES, 96, peak)
    assert [(int(p), int(s)) for p, s in zip(found.place, found.steps, strict=True)] == [(0, 4), (1, 1), (1, 2), (1, 4)]


def test_what_fits_the_host_and_not_the_device_makes_no_shape() -> None:
    machines = {one.name: one for one in TYPES}
    assert all(one.memory_gib > 2 * one.device_memory_gib for one in TYPES), "else this test says nothing"
    gib = {name: one.device_memory_gib * 2**30 for name, one in machines.items()}
    just = shapes([[1, 0, 0]], LINES, 96, lambda name, batch: gib[name] * batch / 96, steps=(1,))
    over = shapes([[1, 0, 0]], LINES, 96, lambda name, batch: gib[name] * batch / 95, steps=(1,))
    assert just.samples.tolist() == [[96]] and not [row for row in over.samples.tolist() if row[0] > 95]


def test_a_device_that_holds_no_sample_makes_no_shape() -> None:
    assert len(shapes([[1, 0, 0]], LINES, 96, lambda name, batch: 2.0**40)) == 0


def test_few_clusters_are_all_enumerated_and_many_by_ladders() -> None:
    every = compositions(3, max_hosts=4, most=20_000)
    assert len(every) == 3 + 6 + 10 + 15 and len({tuple(row) for row in every.tolist()}) == len(every)
    mixed = compositions(10, max_hosts=64, most=20_000)
    assert len({tuple(row) for row in mixed.tolist()}) == len(mixed)
    assert (mixed > 0).sum(axis=1).max() == 3 and mixed.sum(axis=1).max() == 64
    alone = mixed[(mixed > 0).sum(axis=1) == 1].max(axis=1)
    assert sorted(alone.tolist()) == sorted([*range(1, 65)] * 10)
    assert [3, 2, 1] in [[int(one) for one in row if one] for row in mixed[:3000].tolist()]
    for types in (12, 20, 60):
        counts = compositions(types, max_hosts=64, most=20_000, most_mixed=100_000)
        assert len(counts) <= 100_000 and (counts > 0).sum(axis=1).max() >= 2
