"""What an agent tells about an ended launch, what it lets a workload see, and what it never imports."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tasks.node.agent import DEVICES_WITHIN_S, Agent
from tasks.node.processes import EXIT_NO_DEVICE
from tasks.node.record import ANY, CPU, Devices, Item, Plan, write_json


def plan(attempt: int, *items: Item, ranks: tuple[int, ...] = ()) -> Plan:
    return Plan(
        lease_id="l",
        attempt=attempt,
        addresses=["10.0.0.1", "10.0.0.2", "10.0.0.3"],
        expected=[Devices(name=CPU, count=1)] * 3,
        workloads=[],
        items=list(items),
        port=29500,
        ranks=list(ranks),
    )


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    agent = Agent(mailbox=tmp_path, node=1, address="10.0.0.2", deadline_unix=time.time() + 60)
    agent.scratch.mkdir(parents=True)
    return agent


def test_each_attempt_is_taken_once_and_never_an_older_one(agent: Agent, tmp_path: Path) -> None:
    assert agent.new_plan() is None
    for attempt, taken in ((2, True), (2, False), (1, False), (3, True)):
        agent.read_mtime_ns = 0
        write_json(tmp_path / "plan.json", plan(attempt))
        found = agent.new_plan()
        assert (found is not None) == taken
        if found is not None:
            agent.attempt = found.attempt


def test_a_full_disk_does_not_end_the_agent(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_path: Path, _body: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tasks.node.agent.write_json", full)
    agent.heartbeat()
    assert "No space left" in capsys.readouterr().err


ITEM = Item(run_id="r", kind="train", nodes=[1, 2], devices=[1, 4], batches=[8, 8])
WAITED_FOR = [Devices(name=CPU, count=1), *[Devices(name="A10G", count=1)] * 2]


@pytest.mark.parametrize(
    ("whole", "node", "words"),
    [
        (
            plan(3),
            1,
            "--nnodes 3 --node-rank 1 --nproc-per-node 1 --master-addr 10.0.0.1 --master-port 29503",
        ),
        # without a lost node the others meet at the first that is left, each with its devices
        (
            plan(2, ITEM, ranks=(1, 2)),
            1,
            "--node-rank 0 --nproc-per-node 1 --master-addr 10.0.0.2 --max-restarts 0",
        ),
        (plan(2, ITEM, ranks=(1, 2)), 2, "--node-rank 1 --nproc-per-node 4 --master-addr 10.0.0.2"),
        # torchrun waits for those who look for their devices before it
        (replace(plan(1), expected=WAITED_FOR, join_s=300.0), 0, "--rdzv-conf timeout=600"),
        (
            replace(plan(1), expected=[Devices(name=ANY, count=1)] * 3, join_s=300.0),
            0,
            "--rdzv-conf timeout=300",
        ),
    ],
)
def test_torchrun_is_given_its_place_and_how_long_to_wait(
    whole: Plan, node: int, words: str
) -> None:
    one = Agent(mailbox=Path("m"), node=node, address="", deadline_unix=0.0)
    options = dict(pairwise(one.command(whole)))
    assert all(
        options[name] == value
        for name, value in zip(words.split()[::2], words.split()[1::2], strict=True)
    )


class Started(Exception):
    """Stands for a process; holds what was to be started."""


def started(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, expected: Devices, attempt: int = 1
) -> tuple[list[str], dict[str, str]]:
    def start(words: list[str], *, env: dict[str, str], **_: object) -> None:
        raise Started(words, env)

    monkeypatch.setattr("tasks.node.agent.subprocess.Popen", start)
    monkeypatch.setattr("tasks.node.agent.interface_of", lambda address: "eth0")
    item = Item(run_id="r", kind="train", nodes=[1], batches=[8])
    with pytest.raises(Started) as found:
        agent.start(
            replace(plan(attempt, item), expected=[Devices(name=CPU, count=1), expected, expected])
        )
    words, environment = found.value.args
    return words, environment


def test_torchrun_starts_behind_a_check_where_a_gpu_was_bought_and_a_machine_waits_once(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = []
    for attempt in (1, 2):
        words, _ = started(agent, monkeypatch, Devices(name="A10G", count=4), attempt)
        options = dict(pairwise(words[: words.index("--")]))
        assert options["-m"] == "node.device_check" and options["--node"] == "1"
        assert options["--plan"].endswith(f"plan-{attempt}.json")
        assert words[words.index("--") + 1 :][1:3] == ["-m", "torch.distributed.run"]
        waits.append(float(options["--wait-s"]))
        agent.waits_until = time.monotonic() - 1.0
    assert waits == [pytest.approx(DEVICES_WITHIN_S, abs=1.0), 0.0]


def test_a_machine_without_its_devices_ends_the_attempt_by_that_name(agent: Agent) -> None:
    agent.attempt = 1
    agent.log_path.parent.mkdir(exist_ok=True)
    agent.log_path.write_text(f"srift[{EXIT_NO_DEVICE}]: bought for 4 x A10G\n")
    agent.launch = subprocess.Popen(["sh", "-c", f"exit {EXIT_NO_DEVICE}"])
    agent.launch.wait()
    agent.end_launch()
    finished = json.loads((agent.folder / "finished-1.json").read_text())
    assert (finished["exit_code"], finished["worker_exit_code"]) == (EXIT_NO_DEVICE, EXIT_NO_DEVICE)
    assert finished["reason"] == "bought for 4 x A10G"


def test_the_agent_never_imports_torch() -> None:
    code = "import sys, tasks.node.agent; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
