"""An agent reports how a launch ended, what it lets a workload see, and never imports torch."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.node.agent import Agent
from tasks.node.processes import EXIT_NO_DEVICE
from tasks.node.record import CPU, Devices, Item, write_json
from tests.tasks.node.conftest import plan


@pytest.fixture
def agent(tmp_path):
    agent = Agent(mailbox=tmp_path, node=1, address="10.0.0.2", deadline_unix=time.time() + 60)
    agent.scratch.mkdir(parents=True)
    return agent


def test_each_attempt_is_taken_once_and_never_an_older_one(agent, tmp_path):
    assert agent.new_plan() is None
    for attempt, is_taken in ((2, True), (2, False), (1, False), (3, True)):
        write_json(tmp_path / "plan.json", plan(attempt=attempt))
        found = agent.new_plan()
        assert (found is not None) == is_taken
        agent.attempt = max(agent.attempt, attempt)


ITEM = Item(run_id="r", kind="train", nodes=[1, 2], devices=[1, 4], batches=[8, 8])
GPUS = {"expected": [Devices(name=CPU, count=1), *[Devices(name="A10G", count=1)] * 2]}
WITHOUT_0 = plan(ITEM, attempt=2, ranks=[1, 2])


@pytest.mark.parametrize(
    ("whole", "node", "words"),
    [
        (plan(attempt=3), 1, "--nnodes=3 --node-rank=1 --nproc-per-node=1 --master-port=29503"),
        # without a lost node the others meet at the first that is left, each with its devices
        (WITHOUT_0, 2, "--node-rank=1 --nproc-per-node=4 --master-addr=10.0.0.2"),
        # torchrun waits for machines that look for their devices before it
        (plan(**GPUS, join_s=300.0), 0, "--rdzv-conf=timeout=600"),
    ],
)  # fmt: skip
def test_torchrun_is_given_its_place_and_how_long_to_wait(whole, node, words):
    agent = Agent(mailbox=Path("m"), node=node, address="", deadline_unix=0.0)
    assert set(agent.command(whole)) >= set(words.split())


def test_a_launch_is_prepared_first_and_sees_no_credentials(agent, monkeypatch):
    started = {}
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "leaks")
    monkeypatch.setattr("tasks.node.agent.interface_of", lambda _address: "eth0")
    monkeypatch.setattr(
        "tasks.node.agent.subprocess.Popen",
        lambda words, **named: started.update(named, words=words),
    )
    agent.start(plan(Item(run_id="r", kind="train", nodes=[1], batches=[8]), attempt=2))
    assert started["words"][2:5:2] == ["node.prepare", "torch.distributed.run"]
    assert started["env"]["SRIFT_PLAN"].endswith("node-1/scratch/plan-2.json")
    assert "leaks" not in started["env"].values()


def test_a_machine_without_its_devices_ends_the_attempt_by_that_name(agent):
    agent.attempt = 1
    agent.log_path.write_text(f"srift[{EXIT_NO_DEVICE}]: bought for 4 x A10G\n")
    agent.launch = subprocess.Popen(["sh", "-c", f"exit {EXIT_NO_DEVICE}"])
    agent.launch.wait()
    agent.end_launch()
    finished = json.loads((agent.folder / "finished-1.json").read_text())
    assert (finished["exit_code"], finished["worker_exit_code"]) == (EXIT_NO_DEVICE, EXIT_NO_DEVICE)
    assert finished["reason"] == "bought for 4 x A10G"


def test_the_agent_never_imports_torch():
    code = "import sys, tasks.node.agent, tasks.node.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
