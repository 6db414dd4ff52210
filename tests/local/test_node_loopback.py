"""Two real agents, real torchrun and real collectives on loopback: what a controller sees in the
mailbox.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks import node
from tasks.node.processes import descendants
from tasks.node.record import CPU, Devices, Item, Plan, WorkloadFile, write_json

pytestmark = [pytest.mark.local, pytest.mark.enable_socket]

PATIENCE_S = 50.0
EXIT_LOST_PEER = 4

# Rank 0's samples are all 1, rank 1's all -3: one batch of 6 + 2 has its optimum at 0, where the
# loss is 3. Ranks that were simply averaged would settle at -1, where it is 4; without division by
# the micro-steps it diverges.
TWO_KINDS = """
import os, torch

class Weight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([5.0]))
    def forward(self, inputs):
        return inputs * 0 + self.weight

def build(lr=0.6):
    model = Weight()
    value = 1.0 if os.environ["RANK"] == "0" else -3.0
    def make_batch(batch):
        rows = torch.full((batch, 1), value)
        return rows, rows
    return model, torch.nn.MSELoss(), make_batch, torch.optim.SGD(model.parameters(), lr=lr)
"""

ROW_17 = "row 17 is not a number"  # as the workload below says
FAULTY = """
import os, torch

def build(at):
    model = torch.nn.Linear(4, 1)
    seen = [0]
    def make_batch(batch):
        seen[0] += 1
        if seen[0] == at and os.environ["RANK"] == "1":
            raise ValueError("row 17 is not a number")
        return torch.ones(batch, 4), torch.ones(batch, 1)
    return model, torch.nn.MSELoss(), make_batch, torch.optim.SGD(model.parameters(), lr=0.1)
"""


QUICK = {"warmup_steps": 2, "least_steps": 8, "most_steps": 12, "most_s": 2.0}
LONGER = QUICK | {"least_steps": 10, "most_steps": 14}


def workload(file: str, name: str = "", **arguments: object) -> WorkloadFile:
    """The workload in `file`; two samples' kinds in `two`, a fault `at` a batch in `faulty`, a
    built-in in `wide`.
    """
    named = name or file
    return WorkloadFile(
        name=named,
        digest=named,
        file=f"workloads/{file}.py",
        function="build",
        arguments=dict(arguments),
    )


class Agents:
    """Agents on loopback, two unless asked for more, and the controller's side of their mailbox."""

    def __init__(self, mailbox: Path, package_parent: Path, many: int = 2) -> None:
        self.mailbox, self.many = mailbox, many
        self.port = free_port()
        environment = {
            **os.environ,
            "PYTHONPATH": str(package_parent),
            "AWS_SECRET_ACCESS_KEY": "must not travel",
        }
        self.processes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "node", "--mailbox", str(mailbox), "--node", str(one)),
                    *("--address", "127.0.0.1", "--deadline", str(time.time() + 120)),
                ],
                env=environment,
                cwd=mailbox,
            )
            for one in range(many)
        ]

    def plan(
        self,
        attempt: int,
        workloads: list[WorkloadFile],
        items: list[Item],
        ranks: tuple[int, ...] = (0, 1),
        **go: Any,
    ) -> None:
        """Ask for `items`, and say `go` once the workers of `ranks` are armed."""
        plan = Plan(
            lease_id="lease",
            attempt=attempt,
            addresses=["127.0.0.1"] * self.many,
            expected=[Devices(name=CPU, count=1)] * self.many,
            workloads=workloads,
            items=items,
            port=self.port - attempt,  # the agents add the attempt
            timeout_s=20.0,
            ranks=list(ranks),
            pairs=bool(go),
        )
        write_json(self.mailbox / "plan.json", plan)
        self.wait_for(
            lambda: all(
                (self.mailbox / f"node-{one}/armed-{attempt}.json").exists() for one in ranks
            )
        )
        write_json(self.mailbox / f"go-{attempt}.json", go)

    def finished(self, attempt: int, ranks: tuple[int, ...] = (0, 1)) -> list[dict[str, Any]]:
        """How the nodes' launches ended."""
        paths = [self.mailbox / f"node-{one}/finished-{attempt}.json" for one in ranks]
        self.wait_for(lambda: all(path.exists() for path in paths))
        return [json.loads(path.read_text()) for path in paths]

    def records(self) -> dict[str, dict[str, Any]]:
        """Every record in the mailbox, by run."""
        paths = self.mailbox.glob("node-*/records/*.json")
        return {path.stem: json.loads(path.read_text()) for path in paths}

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Look until `condition` holds; fail with the logs when patience ends."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > until:
                pytest.fail(
                    "\n".join(path.read_text() for path in self.mailbox.glob("node-*/log-*.txt"))
                )
            time.sleep(0.05)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def agents(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Agents]:
    """Agents that run a copy of the package, as on a machine, two or as many as asked; ended
    whatever happens.
    """
    mailbox = tmp_path / "mailbox"
    mailbox.mkdir()
    shutil.copytree(
        Path(node.__file__).parent,
        tmp_path / "away" / "node",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (mailbox / "workloads").mkdir()
    (mailbox / "workloads/two.py").write_text(TWO_KINDS)
    (mailbox / "workloads/faulty.py").write_text(FAULTY)
    shutil.copy(Path(node.__file__).parent / "workloads/wide_mlp.py", mailbox / "workloads/wide.py")
    running = Agents(mailbox, tmp_path / "away", getattr(request, "param", 2))
    try:
        yield running
    finally:
        for process in running.processes:
            process.terminate()
        for process in running.processes:
            process.wait(timeout=10)


def test_one_launch_serves_profiles_probes_and_runs_and_a_faulty_workload_costs_only_its_own(
    agents: Agents,
) -> None:
    workloads = [
        workload("two"),
        workload("wide", width=700, frames=1),
        workload("faulty", "at-once", at=1),
        workload("faulty", "later", at=4),
    ]
    profile = Item(run_id="profile", kind="profile", nodes=[1], workload="wide", batches=[8, 64])
    probe = Item(run_id="probe", kind="probe", nodes=[0, 1], message_bytes=[1024, 4_194_304])
    fails_early = Item(
        run_id="early", kind="train", nodes=[0, 1], workload="at-once", batches=[2, 2], **QUICK
    )
    unknown = Item(
        run_id="unknown",
        kind="train",
        nodes=[0],
        workload="two",
        batches=[2],
        strategy="dpp",
        **QUICK,
    )
    unequal = Item(
        run_id="unequal",
        kind="train",
        nodes=[0, 1],
        workload="two",
        batches=[6, 2],
        accumulation_steps=2,
        **QUICK,
    )
    alone = Item(run_id="alone", kind="train", nodes=[1], workload="two", batches=[8], **QUICK)
    both = Item(
        run_id="both", kind="train", nodes=[0, 1], workload="wide", batches=[16, 16], **QUICK
    )
    fails_late = Item(
        run_id="late", kind="train", nodes=[0, 1], workload="later", batches=[2, 2], **QUICK
    )
    never = Item(run_id="after-late", kind="train", nodes=[0], workload="two", batches=[4], **QUICK)

    agents.plan(
        1,
        workloads,
        [profile, probe, fails_early, unknown, unequal, alone, both, fails_late, never],
    )
    first = agents.finished(1)
    records = agents.records()

    assert [one["exit_code"] != 0 for one in first] == [True, True]
    assert {one["run_id"] for one in first} == {"late"}
    assert set(records) == {
        "profile",
        "probe",
        "early",
        "unknown",
        "unequal",
        "alone",
        "both",
        "late",
    }
    assert {run for run, one in records.items() if one["status"] == "failed"} == {
        "early",
        "unknown",
        "late",
    }
    assert (
        records["early"]["reason"]
        == f"node 1: ValueError: {ROW_17} (at-once, line 10, in make_batch)"
    )
    assert "adasum-delta, ddp" in records["unknown"]["reason"]
    assert ROW_17 in records["late"]["reason"]

    assert records["unequal"]["values"]["last_loss"] == pytest.approx(3.0, abs=1e-3)
    assert records["alone"]["values"]["last_loss"] == pytest.approx(0.0, abs=1e-3)
    assert records["alone"]["values"]["sync_s"] == 0.0
    measured = records["both"]["values"]
    assert measured["gradient_bytes"] == 4 * measured["parameters"] == sum(measured["bucket_bytes"])
    several = [records[run]["values"] for run in ("unequal", "both")]
    assert all(one["sync_s"] < one["step_s"] for one in several)
    assert any(one["sync_s"] > 0 for one in several)
    assert len(measured["rank_step_s"]) == 2 and 8 <= measured["steps"] <= 12
    assert measured["peak_bytes"] > 50e6
    written = [one for one in records.values() if "checkpoint_s" in one["values"]]
    assert len(written) == len({one["item"]["workload"] for one in written})
    assert all(
        one["values"]["checkpoint_bytes"] >= one["values"]["gradient_bytes"] for one in written
    )
    assert written and all(0 < one["values"]["checkpoint_s"] < 30 for one in written)
    rows = records["profile"]["values"]["rows"]
    assert [row["batch"] for row in rows] == [8, 64]
    assert rows[0]["backward_s"] < rows[1]["backward_s"]
    buckets = records["profile"]["values"]["buckets"]
    assert [one["bytes"] for one in buckets] == measured["bucket_bytes"]
    assert 0 < buckets[0]["ready_fraction"] < buckets[-1]["ready_fraction"] <= 1
    shares = [
        one["values"]["taken_share"] for one in records.values() if one["status"] == "measured"
    ]
    assert len(shares) == 5 and all(0 <= share <= 1 for share in shares)
    small, large = records["probe"]["values"]["rows"]
    assert small["seconds"] < large["seconds"]

    agents.plan(2, workloads, [never])
    assert [one["exit_code"] for one in agents.finished(2)] == [0, 0]
    assert agents.records()["after-late"]["attempt"] == 2

    write_json(agents.mailbox / "done.json", {})
    assert [process.wait(timeout=10) for process in agents.processes] == [0, 0]


def test_a_killed_rank_wakes_its_peers_and_sigterm_leaves_nothing_running(agents: Agents) -> None:
    wide = workload("wide")
    long = Item(
        run_id="long",
        kind="train",
        nodes=[0, 1],
        workload="wide",
        batches=[4, 4],
        least_steps=9999,
        most_steps=9999,
        most_s=60.0,
    )
    agents.plan(1, [wide], [long])
    agents.wait_for(lambda: under_way(agents.mailbox / "node-1/heartbeat.json") == "long")
    # whether it is still building or already stepping, its peer must notice
    workers = [
        one for one in descendants(agents.processes[1].pid) if b"node.worker" in command_line(one)
    ]
    os.kill(workers[-1], 9)
    ends = agents.finished(1)
    assert [one["exit_code"] != 0 for one in ends] == [True, True]
    assert [one["run_id"] for one in ends] == ["long", "long"]
    assert [one["worker_exit_code"] for one in ends] == [EXIT_LOST_PEER, -9]
    assert agents.records() == {}

    agents.plan(2, [wide], [long])
    below = [one for process in agents.processes for one in descendants(process.pid)]
    assert len(below) >= 4
    environment = Path(f"/proc/{below[-1]}/environ").read_bytes()
    assert b"must not travel" not in environment and b"OMP_NUM_THREADS=1" in environment
    for process in agents.processes:
        process.terminate()
        process.wait(timeout=10)
    agents.wait_for(lambda: not any(Path(f"/proc/{one}").exists() for one in below))


def test_unequal_machines_train_as_one_batch_would_and_an_item_uses_no_more_devices_than_it_says(
    agents: Agents,
) -> None:
    mixed = Item(
        run_id="mixed",
        kind="train",
        nodes=[0, 1],
        devices=[2, 1],
        workload="two",
        batches=[3, 2],
        accumulation_steps=2,
        **LONGER,
    )
    single = Item(run_id="single", kind="train", nodes=[0], workload="two", batches=[8], **LONGER)
    within = replace(single, run_id="within", devices=[2], batches=[4])
    beside = replace(single, run_id="beside", nodes=[1])
    one_each = replace(mixed, run_id="one-each", devices=[], batches=[6, 2])
    paced = replace(mixed, run_id="paced", workload="slow")
    profile = Item(run_id="profile", kind="profile", nodes=[0], workload="two", batches=[4, 8, 16])
    probe = Item(
        run_id="probe", kind="probe", nodes=[0, 1], devices=[2, 1], message_bytes=[1024, 65536]
    )
    workloads = [workload("two", lr=0.4), workload("two", "slow", lr=0.01)]
    items = [within, beside, single, profile, mixed, paced, one_each, probe]
    agents.plan(1, workloads, items)
    assert [one["exit_code"] for one in agents.finished(1)] == [0, 0]
    records = agents.records()
    assert {run: one["reason"] for run, one in records.items()} == {
        item.run_id: "" for item in items
    }
    values = {run: one["values"] for run, one in records.items()}
    ranks = {
        run: len(values[run]["rank_step_s"])
        for run in ("mixed", "within", "single", "beside", "one-each")
    }
    assert ranks == {"mixed": 3, "within": 2, "single": 1, "beside": 1, "one-each": 2}
    # 3 samples of 1 and 3 + 2 of -3: the mean is -1.5, and there the loss is the variance. Averaged
    # ranks: -1.67.
    assert values["mixed"]["last_loss"] == pytest.approx(3.75, abs=1e-3)
    # neither is a step too long or too short: from 5, each takes 2 % of the way
    way = 6.5 * 0.98 ** (paced.warmup_steps + values["paced"]["steps"] - 1)
    assert values["paced"]["last_loss"] == pytest.approx(3.75 + way**2, rel=1e-4)
    assert values["within"]["last_loss"] == pytest.approx(4.0, abs=1e-3)
    assert values["single"]["last_loss"] == pytest.approx(0.0, abs=1e-3)
    assert values["one-each"]["last_loss"] == pytest.approx(3.0, abs=1e-3)
    assert len(values["probe"]["rows"]) == 2 and len(values["profile"]["rows"]) == 3

    agents.plan(2, workloads, [replace(beside, run_id="without-node-0")], ranks=(1,))
    assert agents.finished(2, ranks=(1,))[0]["exit_code"] == 0
    assert agents.records()["without-node-0"]["attempt"] == 2
    assert not (agents.mailbox / "node-0" / "finished-2.json").exists()


def under_way(heartbeat: Path) -> str:
    """Run that a heartbeat names."""
    return str(json.loads(heartbeat.read_text())["run_id"]) if heartbeat.exists() else ""


def command_line(process: int) -> bytes:
    """Arguments of a process, joined by zero bytes; empty if it is gone."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def test_the_same_seed_learns_the_same_another_does_not_and_a_loss_that_is_no_number_ends_it(
    agents: Agents,
) -> None:
    workloads = [workload("wide", width=64, frames=1), workload("two", "nan", lr=1e30)]
    both: dict[str, Any] = {
        "kind": "learn",
        "nodes": [0, 1],
        "batches": [6, 2],
        "most_steps": 22,
        "windows": 5,
    }
    items = [
        Item(run_id="one", workload="wide", seed=1, **both),
        Item(run_id="again", workload="wide", seed=1, **both),
        Item(run_id="other", workload="wide", seed=2, **both),
        Item(run_id="sparse", workload="wide", seed=1, strategy="ddp-mstopk", **both),
        Item(run_id="short", workload="wide", seed=1, most_s=1e-9, **both),
        Item(run_id="nan", workload="nan", **both),
        Item(run_id="uneven", workload="wide", **both | {"windows": 23}),
    ]
    agents.plan(1, workloads, items)
    agents.finished(1)
    records = agents.records()
    assert {run for run, one in records.items() if one["status"] == "failed"} == {
        "uneven",
    }
    assert "23 windows" in records["uneven"]["reason"]
    losses = {
        run: one["values"]["losses"] for run, one in records.items() if one["status"] == "measured"
    }
    assert len(losses["one"]) == 5 and records["one"]["values"]["steps_a_window"] == 4
    assert losses["one"] == losses["again"] and losses["one"] != losses["other"]
    assert losses["sparse"] != losses["one"] and losses["sparse"][0] == pytest.approx(
        losses["one"][0], rel=0.5
    )
    assert losses["short"] == losses["one"][:1]
    assert (
        losses["nan"] == []
        and records["nan"]["values"]["diverged"]
        and not records["one"]["values"]["diverged"]
    )
    assert not any("step_s" in one["values"] for one in records.values())
