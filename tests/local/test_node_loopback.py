"""Two real agents, real torchrun and real collectives on loopback: what a controller sees in the
mailbox.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tasks import node
from tasks.node.processes import descendants
from tasks.node.record import CPU, Devices, Item, Plan, WorkloadFile, write_json
from tests.local.hosts import wait_for
from tests.ports import free_port

pytestmark = [pytest.mark.local, pytest.mark.enable_socket]

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

def build(lr=0.6, least=1):
    model = Weight()
    value = 1.0 if os.environ["RANK"] == "0" else -3.0
    def make_batch(batch):
        if batch < least and value < 0:
            raise RuntimeError("too few rows")
        rows = torch.full((batch, 1), value)
        return rows, rows
    return model, torch.nn.MSELoss(), make_batch, torch.optim.SGD(model.parameters(), lr=lr)
"""

ROW_17 = "row 17 is not a number"  # as the workload below says
FAULTY = """
import os, torch
class Across(torch.optim.SGD):
    __module__ = "torch.optim"  # otherwise zero1 refuses it
    def step(self, closure=None):
        held, = self.param_groups
        held["lr"] = 0.1 / len(held["params"])
        return super().step(closure)

def build(at, across=False):
    model = torch.nn.Linear(4, 1)
    seen = [0]
    def make_batch(batch):
        seen[0] += 1
        if seen[0] == at and os.environ["RANK"] == "1":
            raise ValueError("row 17 is not a number")
        return torch.ones(batch, 4), torch.ones(batch, 1)
    kind = Across if across else torch.optim.SGD
    return model, torch.nn.MSELoss(), make_batch, kind(model.parameters(), lr=0.1)
"""


QUICK = {"warmup_steps": 2, "least_steps": 8, "most_steps": 12, "most_s": 2.0}
LONGER = QUICK | {"least_steps": 10, "most_steps": 14}


def workload(file, name="", **arguments):
    """The workload in `file`; two samples' kinds in `two`, a fault `at` a batch in `faulty`, a
    built-in in `wide`.
    """
    name = name or file
    path = f"workloads/{file}.py"
    return WorkloadFile(name=name, digest=name, file=path, function="build", arguments=arguments)


def train(run_id, workload, nodes, batches, **changes):
    options = {"kind": "train"} | QUICK | changes
    return Item(run_id=run_id, workload=workload, nodes=nodes, batches=batches, **options)


class Agents:
    """Two agents on loopback, and the controller's side of their mailbox."""

    def __init__(self, mailbox, package_parent):
        self.mailbox, self.port = mailbox, free_port()
        environment = {
            **os.environ,
            "PYTHONPATH": str(package_parent),
            "AWS_SECRET_ACCESS_KEY": "must not travel",
        }
        agent = [sys.executable, "-m", "node", "--mailbox", str(mailbox), "--address", "127.0.0.1"]
        agent += ["--deadline", str(time.time() + 120), "--node"]
        self.processes = [
            subprocess.Popen([*agent, str(node)], env=environment, cwd=mailbox) for node in (0, 1)
        ]

    def plan(self, attempt, workloads, items, ranks=(0, 1)):
        """Ask for `items`, and give the go once the workers of `ranks` are armed."""
        plan = Plan(
            lease_id="lease",
            attempt=attempt,
            addresses=["127.0.0.1"] * 2,
            expected=[Devices(name=CPU, count=1)] * 2,
            workloads=workloads,
            items=items,
            port=self.port - attempt,  # the agents add the attempt
            timeout_s=20.0,
            ranks=list(ranks),
        )
        write_json(self.mailbox / "plan.json", plan)
        self.wait_for_files(f"armed-{attempt}.json", ranks)
        write_json(self.mailbox / f"go-{attempt}.json", {"order": []})

    def wait_for_files(self, name, nodes):
        paths = [self.mailbox / f"node-{node}/{name}" for node in nodes]
        self.wait_for(lambda: all(path.exists() for path in paths))
        return paths

    def finished(self, attempt, ranks=(0, 1)):
        """How the nodes' launches ended."""
        paths = self.wait_for_files(f"finished-{attempt}.json", ranks)
        return [json.loads(path.read_text()) for path in paths]

    def records(self):
        """Every record in the mailbox, by run."""
        paths = self.mailbox.glob("node-*/records/*.json")
        return {path.stem: json.loads(path.read_text()) for path in paths}

    def wait_for(self, condition):
        """Look until `condition` holds; fail with the logs when patience ends."""
        logs = self.mailbox.glob("node-*/log-*.txt")
        wait_for(condition, why=lambda: [path.read_text() for path in logs])


@pytest.fixture
def agents(tmp_path):
    """Agents that run a copy of the package, as on a machine; ended whatever happens."""
    mailbox, package = tmp_path / "mailbox", Path(node.__file__).parent
    (mailbox / "workloads").mkdir(parents=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, tmp_path / "away/node", ignore=ignore)
    (mailbox / "workloads/two.py").write_text(TWO_KINDS)
    (mailbox / "workloads/faulty.py").write_text(FAULTY)
    shutil.copy(package / "workloads/wide_mlp.py", mailbox / "workloads/wide.py")
    running = Agents(mailbox, tmp_path / "away")
    try:
        yield running
    finally:
        for process in running.processes:
            process.terminate()
        for process in running.processes:
            process.wait(timeout=10)


def test_one_launch_serves_profiles_probes_and_runs_and_a_faulty_workload_costs_only_its_own(
    agents,
):
    workloads = [
        workload("two", least=4),
        workload("wide", width=700, frames=1),
        workload("faulty", "at-once", at=1),
        workload("faulty", "later", at=4),
        workload("faulty", "across", at=0, across=True),
    ]
    items = [
        Item(run_id="profile", kind="profile", nodes=[1], workload="wide", batches=[8, 64]),
        Item(run_id="probe", kind="probe", nodes=[0, 1], message_bytes=[1024, 4_194_304]),
        train("early", "at-once", [0, 1], [2, 2]),
        train("unknown", "two", [0], [2], strategy="dpp"),
        train("across", "across", [0, 1], [2, 2], strategy="zero1"),
        train("shared", "two", [0, 1], [4, 4], strategy="zero1"),
        train("both", "wide", [0, 1], [16, 16]),
        train("late", "later", [0, 1], [2, 2]),
        train("after-late", "two", [1], [8]),
    ]
    agents.plan(1, workloads, items)
    first = agents.finished(1)
    records = agents.records()

    assert [end["exit_code"] != 0 for end in first] == [True, True]
    assert {end["run_id"] for end in first} == {"late"}
    assert set(records) == {item.run_id for item in items} - {"after-late"}
    reasons = {run: body["reason"] for run, body in records.items() if body["status"] == "failed"}
    assert set(reasons) == {"early", "unknown", "late", "across"}
    assert re.search(r"step 10 .* loss is \S+ with zero1, but \S+ with ddp", reasons["across"])
    assert reasons["early"] == f"node 1: ValueError: {ROW_17} (at-once, line 16, in make_batch)"
    assert "adasum-delta, ddp" in reasons["unknown"] and ROW_17 in reasons["late"]

    # The comparison takes batches of two rows, for which rank 1 raises RuntimeError.
    assert "too few rows" in records["shared"]["reason"]

    values = {run: body["values"] for run, body in records.items() if body["status"] == "measured"}
    both = values["both"]
    assert both["gradient_bytes"] == 4 * both["parameters"]
    assert 0 <= both["sync_s"] < both["step_s"]
    assert len(both["rank_compute_s"]) == 2 and 8 <= both["steps"] <= 12
    assert both["peak_bytes"] > 50e6
    written = {run: found for run, found in values.items() if "checkpoint_s" in found}
    assert written and len(written) == len({records[run]["item"]["workload"] for run in written})
    for found in written.values():
        assert found["checkpoint_bytes"] >= found["gradient_bytes"]
        assert 0 < found["checkpoint_s"] < 30
    assert [row["batch"] for row in values["profile"]["rows"]] == [8, 64]
    buckets = values["profile"]["buckets"]
    assert sum(bucket["bytes"] for bucket in buckets) == both["gradient_bytes"]
    assert 0 < buckets[0]["ready_fraction"] < buckets[-1]["ready_fraction"] <= 1
    assert len(values) == 4 and all(0 <= found["taken_share"] <= 1 for found in values.values())
    small, large = values["probe"]["rows"]
    assert small["seconds"] < large["seconds"]


def test_a_killed_rank_wakes_its_peers_and_sigterm_leaves_nothing_running(agents):
    wide, forever = workload("wide"), {"least_steps": 9999, "most_steps": 9999, "most_s": 60.0}
    agents.plan(1, [wide], [train("long", "wide", [0, 1], [4, 4], **forever)])
    agents.wait_for(lambda: under_way(agents.mailbox / "node-1/progress.json") == "long")
    # whether it is still building or already stepping, its peer must notice
    below = descendants(agents.processes[1].pid)
    os.kill([process for process in below if b"node.worker" in command_line(process)][-1], 9)
    ends = agents.finished(1)
    assert all(end["exit_code"] != 0 and end["run_id"] == "long" for end in ends)
    assert [end["worker_exit_code"] for end in ends] == [EXIT_LOST_PEER, -9]
    assert agents.records() == {}

    on = train("on", "wide", [1], [4], **forever)
    agents.plan(2, [wide], [train("after", "wide", [1], [4]), on], ranks=(1,))
    agents.wait_for(lambda: under_way(agents.mailbox / "node-1/progress.json") == "on")
    assert agents.records()["after"]["attempt"] == 2
    assert not (agents.mailbox / "node-0/finished-2.json").exists()
    below = [descendant for process in agents.processes for descendant in descendants(process.pid)]
    assert len(below) >= 2
    environment = Path(f"/proc/{below[-1]}/environ").read_bytes()
    assert b"must not travel" not in environment and b"OMP_NUM_THREADS=1" in environment
    for process in agents.processes:
        process.terminate()
        process.wait(timeout=10)
    agents.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))


def test_unequal_machines_train_as_one_batch_would_and_a_seed_decides_what_is_learned(agents):
    """No item uses more devices than it says."""
    mixed = train("mixed", "two", [0, 1], [3, 2], devices=[2, 1], accumulation_steps=2, **LONGER)
    within = train("within", "two", [0], [4], devices=[2], **LONGER)
    beside = train("beside", "two", [1], [8], **LONGER)
    paced = replace(mixed, run_id="paced", workload="slow")
    probe = {"kind": "probe", "devices": [2, 1], "message_bytes": [1024, 65536]}
    items = [within, beside, mixed, paced, train("probe", "", [0, 1], [], **probe)]
    workloads = [workload("two", lr=0.4), workload("two", "slow", lr=0.01)]
    workloads += [workload("wide", width=64, frames=1), workload("two", "nan", lr=1e30)]
    changes = {
        "one": {},
        "again": {},
        "other": {"seed": 2},
        "sparse": {"strategy": "ddp-mstopk"},
        "short": {"most_s": 1e-9},
        "nan": {"workload": "nan"},
    }
    same = {"workload": "wide", "nodes": [0, 1], "batches": [6, 2], "kind": "learn"}
    same |= {"most_steps": 22, "most_s": 6.0, "windows": 5, "seed": 1}
    items += [train(run, **same | change) for run, change in changes.items()]
    agents.plan(1, workloads, items)
    assert [end["exit_code"] for end in agents.finished(1)] == [0, 0]
    records = agents.records()
    reasons = {run: body["reason"] for run, body in records.items()}
    assert reasons == {item.run_id: "" for item in items}
    values = {run: body["values"] for run, body in records.items()}
    ranks = {"mixed": 3, "within": 2, "beside": 0}
    assert {run: len(values[run]["rank_compute_s"]) for run in ranks} == ranks
    # 3 samples of 1 and 3 + 2 of -3: the mean is -1.5, and there the loss is the variance. Averaged
    # ranks: -1.67.
    for run, loss in {"mixed": 3.75, "within": 4.0, "beside": 0.0}.items():
        assert values[run]["last_loss"] == pytest.approx(loss, abs=1e-3)
    assert values["beside"]["sync_s"] == 0.0
    waited = values["mixed"]["step_s"] - max(values["mixed"]["rank_compute_s"])
    assert values["mixed"]["sync_s"] == pytest.approx(max(0.0, waited))
    # neither is a step too long or too short: from 5, each takes 2 % of the way
    way = 6.5 * 0.98 ** (paced.warmup_steps + values["paced"]["steps"] - 1)
    assert values["paced"]["last_loss"] == pytest.approx(3.75 + way**2, rel=1e-4)

    losses = {run: values[run]["losses"] for run in changes}
    assert len(losses["one"]) == 5 and values["one"]["steps_a_window"] == 4
    assert losses["one"] == losses["again"] and losses["one"] != losses["other"]
    assert losses["sparse"] != losses["one"]
    assert losses["sparse"][0] == pytest.approx(losses["one"][0], rel=0.5)
    assert losses["short"] == losses["one"][:1]
    assert losses["nan"] == [] and values["nan"]["diverged"] and not values["one"]["diverged"]
    assert not any("step_s" in values[run] for run in changes)
    write_json(agents.mailbox / "done.json", {})
    assert [process.wait(timeout=10) for process in agents.processes] == [0, 0]


def under_way(progress):
    """Run that a worker reports."""
    return str(json.loads(progress.read_text())["run_id"]) if progress.exists() else ""


def command_line(process):
    """Arguments of a process, joined by zero bytes; empty if it is gone."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""
