"""Two real agents on loopback, one with two ranks and one with one: unequal machines, and going on without one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasks.node.record import Item, WorkloadFile
from tests.local.test_node_loopback import Agents, agents

pytestmark = [pytest.mark.local, pytest.mark.enable_socket]

__all__ = ["agents"]  # a fixture
QUICK = {"warmup_steps": 2, "least_steps": 10, "most_steps": 14, "most_s": 2.0}
TWO = WorkloadFile(
    name="two", digest="d2", file="workloads/two.py", function="build", arguments={"lr": 0.4}
)  # samples of rank 0 are all 1, those of the others all -3
FAULTY = WorkloadFile(name="later", digest="f4", file="workloads/faulty.py", function="build", arguments={"at": 4})


def test_unequal_machines_train_as_one_batch_would_and_an_item_uses_no_more_devices_than_it_says(
    agents: Agents,
) -> None:
    mixed = Item(
        run_id="mixed", kind="train", nodes=[0, 1], devices=[2, 1], workload="two", batches=[3, 2],
        accumulation_steps=2, **QUICK,
    )  # fmt: skip
    single = Item(run_id="single", kind="train", nodes=[0], workload="two", batches=[8], **QUICK)
    within = replace(single, run_id="within", devices=[2], batches=[4])
    beside = replace(single, run_id="beside", nodes=[1])
    one_each = replace(mixed, run_id="one-each", devices=[], batches=[6, 2])
    paced = replace(mixed, run_id="paced", workload="slow")
    profile = Item(run_id="profile", kind="profile", nodes=[0], workload="two", batches=[4, 8, 16])
    probe = Item(run_id="probe", kind="probe", nodes=[0, 1], devices=[2, 1], message_bytes=[1024, 65536])
    items = [within, beside, single, profile, mixed, paced, one_each, probe]
    agents.plan(1, [TWO, replace(TWO, name="slow", arguments={"lr": 0.01})], items)
    assert [one["exit_code"] for one in agents.finished(1)] == [0, 0]
    records = agents.records()
    assert {run: one["reason"] for run, one in records.items()} == {item.run_id: "" for item in items}
    values = {run: one["values"] for run, one in records.items()}
    ranks = {run: len(values[run]["rank_step_s"]) for run in ("mixed", "within", "single", "beside", "one-each")}
    assert ranks == {"mixed": 3, "within": 2, "single": 1, "beside": 1, "one-each": 2}
    # 3 samples of 1 and 3 + 2 of -3: the mean is -1.5, and there the loss is the variance. Averaged ranks: -1.67.
    assert values["mixed"]["last_loss"] == pytest.approx(3.75, abs=1e-3)
    # neither is a step too long or too short: from 5, each takes 2 % of the way
    way = 6.5 * 0.98 ** (paced.warmup_steps + values["paced"]["steps"] - 1)
    assert values["paced"]["last_loss"] == pytest.approx(3.75 + way**2, rel=1e-4)
    assert values["within"]["last_loss"] == pytest.approx(4.0, abs=1e-3)
    assert values["single"]["last_loss"] == pytest.approx(0.0, abs=1e-3)
    assert values["one-each"]["last_loss"] == pytest.approx(3.0, abs=1e-3)
    assert len(values["probe"]["rows"]) == 2 and len(values["profile"]["rows"]) == 3

    agents.plan(2, [TWO], [replace(beside, run_id="without-node-0")], ranks=(1,))
    assert agents.finished(2, ranks=(1,))[0]["exit_code"] == 0
    assert agents.records()["without-node-0"]["attempt"] == 2
    assert not (agents.mailbox / "node-0" / "finished-2.json").exists()


def test_the_device_that_failed_is_named_and_not_its_neighbour_that_lost_it(agents: Agents) -> None:
    late = Item(
        run_id="late", kind="train", nodes=[0, 1], devices=[2, 1], workload="later", batches=[2, 2], **QUICK
    )  # rank 1 fails, the second device of node 0
    agents.plan(1, [FAULTY], [late])
    ends = agents.finished(1)
    assert [one["worker_exit_code"] for one in ends] == [3, 4]
    assert "row 17 is not a number" in ends[0]["reason"] and "node 0 device 1" in ends[0]["reason"]
    assert "node 0 device 1: ValueError: row 17" in agents.records()["late"]["reason"]
