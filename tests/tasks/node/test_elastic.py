"""How those that are there share out the batch of an elastic run, and that their steps are those of one batch."""

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tasks.node.elastic import ElasticRun, shares
from tasks.node.record import Item
from tasks.node.worker import lost_peer
from tests.tasks.node.conftest import give, plan

BATCHES = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@given(BATCHES, st.integers(0, 300))
def test_all_of_the_batch_is_shared_out_and_no_device_gets_more_at_once_than_it_takes(
    batches, more
):
    found = shares(len(batches) + more, batches)
    samples = [sum(sizes) for sizes in found]
    assert sum(samples) == len(batches) + more and min(samples) >= 1
    assert len({len(sizes) for sizes in found}) == 1
    for sizes, most in zip(found, batches, strict=True):
        assert 1 <= sizes[-1] == max(sizes) <= most
    for count, most in zip(samples, batches, strict=True):
        assert abs(count - sum(samples) * most / sum(batches)) < 1 or 1 in samples


def test_after_a_restart_a_machine_that_was_lost_before_they_met_is_not_waited_for_long(
    tmp_path, monkeypatch
):
    """torchrun has no word for it: with the time of a collective, all would stand still for a minute."""
    item = Item(
        run_id="e", kind="elastic", nodes=[0, 1], workload="w", batches=[2, 2], most_steps=9
    )
    torchrun = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
        "TORCHELASTIC_RESTART_COUNT": 1,
    }
    for name, value in torchrun.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("tasks.node.elastic.seconds_since_start", lambda: 0.5)
    monkeypatch.setattr("tasks.node.elastic._LATE_S", 0.5)
    give(plan(item, checkpoints=str(tmp_path / "checkpoints")), tmp_path, 0, monkeypatch)
    run = ElasticRun()
    assert run.patience_s() == run.plan.timeout_s
    run.checkpoints.note_start({"began_unix": 1.0})
    began = time.monotonic()
    with pytest.raises(dist.DistError) as error:
        run.join()
    assert lost_peer(error.value) and time.monotonic() - began < 15
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert run.patience_s() == 4.0


def test_a_restart_draws_other_samples():
    run = object.__new__(ElasticRun)
    run.device, run.rank = torch.device("cpu"), 0
    run.item = Item(run_id="e", kind="elastic", nodes=[0])
    run.checkpoints = SimpleNamespace(newest=lambda _: ({"step": 40, "bytes": 1}, {}))
    closed = []
    loader = SimpleNamespace(seed=7, close=lambda: closed.append(True))
    assert run.restore(SimpleNamespace(stateful={}, loader=loader))["step"] == 40
    assert loader.seed == 47 and closed
