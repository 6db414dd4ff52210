"""A made-up world of GPUs: its times answer to what they should, and its truth is found where it was held out."""

from __future__ import annotations

import numpy as np

from tests.benchmarks.splits import ask
from tests.benchmarks.synthetic_gpus import TYPES, GpuWorld, questions


def test_more_bytes_slower_wires_and_larger_batches_take_longer() -> None:
    world = GpuWorld(0)
    small, large = (world.step("deep-cnn", "a1.four", (4, 4), batch)[0] for batch in (8, 64))
    assert large > small > 0
    assert (
        world.step("medium-lm", "v1.four", (4, 4), 1)[1]
        > world.step("medium-lm", "p1.eight", (4, 4), 1)[1]
        > 0
    )
    assert world.step("deep-cnn", "a1.one", (1,), 8)[1] == 0


def test_one_seed_is_one_world_and_what_is_asked_is_never_known() -> None:
    world = GpuWorld(3)
    runs = world.data().runs
    assert runs.equals(world.data().runs) and runs.equals(GpuWorld(3).data().runs)
    assert not runs.equals(GpuWorld(4).data().runs)
    asked = list(questions(runs, seed=0))
    assert len({(one.name, one.group) for one in asked}) == len(asked) > 40
    assert all(
        one.asked.any() and one.known.any() and not (one.known & one.asked).any() for one in asked
    )


def test_what_was_held_out_is_found() -> None:
    data, devices = GpuWorld(1).data(), {name: row[0] for name, row in TYPES.items()}
    wanted = {("type known on one machine", "t1.four"), ("twelve measurements", "wide-cnn")}
    for one in [
        split for split in questions(data.runs, seed=1) if (split.name, split.group) in wanted
    ]:
        scored = ask(data, one, {}, devices, seed=1)
        assert np.abs(scored["ours"] / scored["measured_s"] - 1).mean() < 0.15, one.name
        assert (
            (scored["low_s"] <= scored["measured_s"]) & (scored["measured_s"] <= scored["high_s"])
        ).mean() > 0.8
