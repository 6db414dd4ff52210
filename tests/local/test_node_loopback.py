"""Two real agents, real torchrun and real collectives on loopback: what a controller sees in the mailbox."""

from __future__ import annotations

import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tasks import node
from tasks.node.processes import descendants
from tasks.node.record import CPU, Devices, Item, Plan, WorkloadFile, write_json
from tasks.node.strategies import strategy
from tasks.node.strategies.adasum import ADASUM

pytestmark = [pytest.mark.local, pytest.mark.enable_socket]

PATIENCE_S = 50.0
EXIT_LOST_PEER = 4

# Rank 0's samples are all 1, rank 1's all -3: one batch of 6 + 2 has its optimum at 0, where the loss is 3.
# Ranks that were simply averaged would settle at -1, where it is 4; without division by the micro-steps it diverges.
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

LOADED = """
import os, torch
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __init__(self, dies_at):
        self.dies_at, self.seen = dies_at, 0
    def __len__(self):
        return 1000
    def __getitem__(self, place):
        self.seen += 1
        if self.seen == self.dies_at and os.environ["RANK"] == "1":
            os._exit(7)
        return torch.ones(4), torch.ones(1)

def build(dies_at=0):
    model = torch.nn.Linear(4, 1)
    loader = DataLoader(Rows(dies_at), batch_size=5, num_workers=1)
    return model, torch.nn.MSELoss(), loader, torch.optim.SGD(model.parameters(), lr=0.1)
"""

# Rank 1's model may be frozen; products may be too large for any scale of fp16, or no number at all.
ODD = """
import os, torch

class Times(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.weight, self.factor = torch.nn.Parameter(torch.ones(4)), factor
    def forward(self, inputs):
        return (inputs * self.weight).sum(1) * self.factor

def build(factor=1.0, frozen=False):
    model = Times(factor)
    if frozen and os.environ["RANK"] == "1":
        model.weight.requires_grad_(False)
    def make_batch(batch):
        return torch.ones(batch, 4), torch.zeros(batch)
    def loss(output, target):
        return (output - target).mean()
    return model, loss, make_batch, torch.optim.SGD(model.parameters(), lr=0.1)
"""

SLOW = """
import os, time, torch

def build():
    model = torch.nn.Linear(4, 1)
    def make_batch(batch):
        time.sleep(0.15 if os.environ["RANK"] == "3" else 0.0)
        return torch.ones(batch, 4), torch.ones(batch, 1)
    return model, torch.nn.MSELoss(), make_batch, torch.optim.SGD(model.parameters(), lr=0.1)
"""


QUICK = {"warmup_steps": 2, "least_steps": 8, "most_steps": 12, "most_s": 2.0}
LONGER = QUICK | {"least_steps": 10, "most_steps": 14}


def workload(file: str, name: str = "", **arguments: object) -> WorkloadFile:
    """The workload in `file`; two samples' kinds in `two`, a fault `at` a batch in `faulty`, a built-in in `wide`."""
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
    """Agents that run a copy of the package, as on a machine, two or as many as asked; ended whatever happens."""
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
    (mailbox / "workloads/loaded.py").write_text(LOADED)
    (mailbox / "workloads/odd.py").write_text(ODD)
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
        == "node 1: ValueError: row 17 is not a number (at-once, line 10, in make_batch)"
    )
    assert "known: adasum, adasum-delta, ddp" in records["unknown"]["reason"]
    assert "row 17 is not a number" in records["late"]["reason"]

    assert records["unequal"]["values"]["last_loss"] == pytest.approx(3.0, abs=1e-3)
    assert records["alone"]["values"]["last_loss"] == pytest.approx(0.0, abs=1e-3)
    assert records["alone"]["values"]["sync_s"] == 0.0
    measured = records["both"]["values"]
    assert measured["gradient_bytes"] == 4 * measured["parameters"] == sum(measured["bucket_bytes"])
    several = [records[run]["values"] for run in ("unequal", "both")]
    assert all(one["sync_s"] < one["step_s"] for one in several)
    assert any(one["sync_s"] > 0 for one in several), (
        "on a busy machine one may wait less than its noise"
    )
    assert len(measured["rank_step_s"]) == 2 and 8 <= measured["steps"] <= 12
    assert measured["peak_bytes"] > 50e6
    written = [one for one in records.values() if "checkpoint_s" in one["values"]]
    assert len(written) == len({one["item"]["workload"] for one in written}), (
        "one of a workload and launch"
    )
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


def test_ranks_that_share_train_as_those_that_do_not_and_a_share_may_be_empty(
    agents: Agents,
) -> None:
    def item(run_id: str, workload: str, batches: list[int], **changes: Any) -> Item:
        return Item(
            run_id=run_id,
            kind="train",
            nodes=[0, 1],
            workload=workload,
            batches=batches,
            **QUICK | changes,
        )

    items = [
        item(f"{workload}-{name}", workload, batches, strategy=name, accumulation_steps=2)
        for workload, batches in (("two", [6, 2]), ("wide", [4, 4]))
        for name in ("ddp", "fsdp", "zero2", "zero1")
    ]
    agents.plan(1, [workload("two"), workload("wide", width=300, frames=1)], items)
    assert [one["exit_code"] for one in agents.finished(1)] == [0, 0]
    values = {run: one["values"] for run, one in agents.records().items()}
    for name in ("fsdp", "zero2", "zero1"):
        assert values[f"two-{name}"]["last_loss"] == pytest.approx(3.0, abs=1e-3), (
            "one weight, on rank 0 alone"
        )
        shared, plain = values[f"wide-{name}"], values["wide-ddp"]
        assert shared["first_loss"] == pytest.approx(plain["first_loss"], rel=1e-4)
        assert shared["sync_s"] is None and shared["rank_compute_s"] == [], (
            "weights are gathered in every step"
        )


def test_compressed_gradients_are_measured_as_others_are_and_no_machine_alone_compresses(
    agents: Agents,
) -> None:
    def item(run_id: str, workload: str, **changes: Any) -> Item:
        return Item(
            run_id=run_id,
            kind="train",
            nodes=[0, 1],
            workload=workload,
            batches=[6, 2],
            **QUICK | changes,
        )

    names = ("ddp-fp16", "ddp-powersgd", "ddp-mstopk")
    items = [
        item(f"{workload}-{name}", workload, strategy=name)
        for workload in ("two", "wide")
        for name in names
    ]
    items += [
        replace(item("alone", "two", strategy="ddp-mstopk"), nodes=[0], batches=[8]),
        item("scaled", "two", strategy="ddp-mstopk", precision="fp16"),
    ]
    agents.plan(1, [workload("two"), workload("wide", width=300, frames=1)], items)
    assert [one["exit_code"] for one in agents.finished(1)] == [0, 0]
    records = agents.records()
    for name in names:
        values = records[f"wide-{name}"]["values"]
        assert values["sync_s"] > 0 and len(values["rank_compute_s"]) == 2
        # of one weight all is sent, at once: unequal batches train as one
        assert records[f"two-{name}"]["values"]["last_loss"] == pytest.approx(3.0, abs=1e-2)
    assert "ddp-mstopk on 1 devices: it needs at least 2 machines" in records["alone"]["reason"]
    assert "ddp-mstopk in fp16" in records["scaled"]["reason"]


@pytest.mark.parametrize("agents", [4], indirect=True)
def test_ranks_send_to_each_other_in_the_order_asked_for_and_records_tell_of_nodes_as_they_come(
    agents: Agents,
) -> None:
    order, batches = (
        [2, 0, 3, 1],
        [6, 2, 2, 2],
    )  # the first rank's samples are of one kind, all others' of another

    def item(run_id: str, nodes: list[int], **changes: Any) -> Item:
        own = [batches[one] for one in nodes]
        return Item(
            run_id=run_id, kind="train", nodes=nodes, workload="two", batches=own, **QUICK | changes
        )

    everyone = [0, 1, 2, 3]
    items = [
        *(item(name, everyone, strategy=name) for name in ("ddp", "fsdp", "ddp-mstopk")),
        item("pair", [0, 1]),
        Item(
            run_id="slow", kind="train", nodes=everyone, workload="slow", batches=[1] * 4, **QUICK
        ),
    ]
    (agents.mailbox / "workloads/slow.py").write_text(SLOW)
    agents.plan(
        1, [workload("two"), workload("slow")], items, (0, 1, 2, 3), order=order, why="because"
    )
    told = json.loads((agents.mailbox / "node-0/armed-1.json").read_text())["pairs"]
    assert (
        told["nodes"] == everyone
        and told["took_s"] > 0
        and len(told["sharing"]) == len(told["byte_s"]) == 3
    )
    assert all(
        sweep[i][j] == sweep[j][i] > 0
        for sweep in told["byte_s"]
        for i in range(4)
        for j in range(i)
    )
    assert [one["exit_code"] for one in agents.finished(1, (0, 1, 2, 3))] == [0] * 4
    records = agents.records()
    values = {run: one["values"] for run, one in records.items()}
    for name in ("ddp", "fsdp", "ddp-mstopk"):
        assert values[name]["last_loss"] == pytest.approx(4.0, abs=1e-2), (
            "half the samples are 1, the others -3"
        )
        assert (
            values[name]["rank_order"] == order and values[name]["rank_order_reason"] == "because"
        )
        assert (
            records[name]["item"]["nodes"] == everyone and values[name]["pairs_s"] == told["took_s"]
        )
    assert sum("pairs" in one for one in values.values()) == 1, "once a launch"
    assert "rank_order" not in values["pair"]
    alone_s = values["slow"]["rank_compute_s"]
    assert max(alone_s) == alone_s[3] > 0.1 > max(alone_s[:3]), (
        "the machine that is slow, wherever it stands in a ring"
    )


def test_adasum_is_measured_as_others_are_and_what_it_cannot_combine_is_said(
    agents: Agents,
) -> None:
    def item(run_id: str, workload: str, batches: list[int], **changes: Any) -> Item:
        return Item(
            run_id=run_id,
            kind="train",
            nodes=[0, 1],
            workload=workload,
            batches=batches,
            **QUICK | changes,
        )

    items = [
        item(f"wide-{name}", "wide", [4, 4], strategy=name, accumulation_steps=2) for name in ADASUM
    ]
    items += [
        item("two-adasum", "two", [6, 2], strategy="adasum"),
        item("two-delta", "two", [6, 2], strategy="adasum-delta"),
        replace(item("alone", "two", [8], strategy="adasum"), nodes=[0]),
        item("scaled", "two", [4, 4], strategy="adasum", precision="fp16"),
    ]
    agents.plan(1, [workload("two"), workload("wide", width=300, frames=1)], items)
    assert [one["exit_code"] for one in agents.finished(1)] == [0, 0]
    records = agents.records()
    for name in ADASUM:
        values = records[f"wide-{name}"]["values"]
        assert values["sync_s"] > 0 and values["last_loss"] < values["first_loss"]
    # of one weight all gradients are parallel: they are averaged, by shares of the batch
    assert records["two-adasum"]["values"]["last_loss"] == pytest.approx(3.0, abs=1e-2)
    assert "adasum-delta with batches of 6 and 2" in records["two-delta"]["reason"]
    assert "adasum on 1 device: vectors are combined in pairs" in records["alone"]["reason"]
    assert "adasum in fp16" in records["scaled"]["reason"]


def test_divided_layers_are_measured_as_others_are_and_what_cannot_be_divided_is_said(
    agents: Agents,
) -> None:
    def item(run_id: str, workload: str, batches: list[int], **changes: Any) -> Item:
        asked = QUICK | {"strategy": "tensor-1d"} | changes
        return Item(
            run_id=run_id, kind="train", nodes=[0, 1], workload=workload, batches=batches, **asked
        )

    items = [
        item("whole", "wide", [4, 4], strategy="ddp", accumulation_steps=2),
        item("divided", "wide", [4, 4], accumulation_steps=2),
        item("unequal", "wide", [6, 2]),
        item("nothing", "two", [4, 4]),
        item("odd", "thin", [4, 4]),
        item("square", "wide", [4, 4], strategy="tensor-2d"),
        item("scaled", "wide", [4, 4], precision="fp16"),
        item("compiled", "wide", [4, 4], switches="compile"),
        Item(run_id="profile", kind="profile", nodes=[0], workload="wide", batches=[8]),
    ]
    known = [
        workload("two"),
        workload("wide", width=300, frames=2),
        workload("wide", "thin", width=301, frames=1),
    ]
    agents.plan(1, known, items)
    assert [one["exit_code"] for one in agents.finished(1)] == [0, 0]
    records = agents.records()
    whole, divided = (records[run]["values"] for run in ("whole", "divided"))
    for name in ("first_loss", "parameters", "gradient_bytes"):
        assert divided[name] == pytest.approx(whole[name], rel=1e-5)
    assert divided["sync_s"] is None and divided["last_loss"] == pytest.approx(1.0, abs=0.1), (
        "of noise alone"
    )
    said = {run: one["reason"] for run, one in records.items()}
    assert "tensor-1d with batches of 6 and 2" in said["unequal"]
    assert "tensor-1d: this model has nothing to divide" in said["nothing"]
    assert "tensor-1d on 2 devices: 0 (Linear of 512 to 301) does not divide by 2" in said["odd"]
    assert (
        "tensor-2d on 2 devices: it needs q x q with q of 2 or more; take ddp, or 4 or 9 devices"
        in said["square"]
    )
    assert "tensor-1d in fp16" in said["scaled"]
    assert (
        "tensor-1d with compile: divided layers are neither recomputed nor compiled"
        in said["compiled"]
    )
    counted = records["profile"]["values"]
    assert counted["divided_weights"] == 2 * 512 * 300 + 300 * 300
    assert counted["divided_inputs"] == 2 * (512 + 300 + 300) and counted["divided_pairs"] == 2 * (
        512 + 300 + 300
    )


def test_states_made_with_the_optimizer_are_shared_out_and_no_whole_weight_is_kept() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    whole = weakref.ref(next(model.parameters()))
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
    )
    try:
        assert dist.group.WORLD is not None
        shared = strategy("fsdp")(model, optimizer, dist.group.WORLD, torch.device("cpu"))
        gc.collect()
        assert whole() is None, "a rank would hold all weights beside its share"
        sums = [state["sum"] for state in optimizer.state.values()]
        assert len(sums) == 4 and all(
            isinstance(one, DTensor) and one.to_local().eq(0.5).all() for one in sums
        )
        shared(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        again = [state["sum"] for state in optimizer.state.values()]
        assert all(one is other for one, other in zip(again, sums, strict=True))
    finally:
        dist.destroy_process_group()


def test_what_cannot_be_trained_in_a_mode_is_a_record_with_its_reason_and_costs_no_other(
    agents: Agents,
) -> None:
    workloads = [
        workload("odd", "frozen", frozen=True),
        workload("odd", "large", factor=float("inf")),
        workload("odd", "no-number", factor=float("nan")),
        workload("two"),
    ]

    def item(run_id: str, workload: str, **changes: Any) -> Item:
        return Item(
            run_id=run_id,
            kind="train",
            nodes=[0, 1],
            workload=workload,
            batches=[2, 2],
            **QUICK | changes,
        )

    said = {
        "no-weights": "node 1: WorkloadError: the model has no parameter to train",
        "no-weights-shared": "node 1: WorkloadError: the model has no parameter to train",
        "fp16": "gradients in fp16 overflow at every scale to",
        "fp16-nan": "gradients in fp16 overflow at every scale to",
        "nan": "the loss went from nan to nan",
        "fp16-shared": "fsdp in fp16: no rank sees all gradients, so that none can scale them; take bf16",
        "offload": "offload: this device is the host's processor, whose memory holds the states already",
        "not-layered": "checkpointing: the model has no part of several layers",
    }
    items = [
        item("no-weights", "frozen"),
        item("no-weights-shared", "frozen", strategy="fsdp"),
        item("fp16", "large", precision="fp16"),
        item("fp16-nan", "no-number", precision="fp16"),
        item("nan", "no-number"),
        item("fp16-shared", "two", precision="fp16", strategy="fsdp"),
        item("offload", "two", strategy="fsdp", switches="offload"),
        item("not-layered", "two", switches="checkpointing"),
        item("after", "two"),
    ]
    agents.plan(1, workloads, items)
    assert [one["exit_code"] for one in agents.finished(1)] == [0, 0], (
        "none of them ends the launch"
    )
    records = agents.records()
    for run, words in said.items():
        assert records[run]["status"] == "failed" and words in records[run]["reason"], records[run][
            "reason"
        ]
    assert records["after"]["status"] == "measured"


def test_a_killed_rank_wakes_its_peers_and_sigterm_leaves_nothing_running(agents: Agents) -> None:
    wide = workload("wide")
    long = Item(
        run_id="long", kind="train", nodes=[0, 1], workload="wide", batches=[4, 4], least_steps=9999, most_steps=9999,
        most_s=60.0,
    )  # fmt: skip
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
    assert agents.records() == {}, "a lost peer is no failure of the workload"

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
        run_id="mixed", kind="train", nodes=[0, 1], devices=[2, 1], workload="two", batches=[3, 2],
        accumulation_steps=2, **LONGER,
    )  # fmt: skip
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
    # 3 samples of 1 and 3 + 2 of -3: the mean is -1.5, and there the loss is the variance. Averaged ranks: -1.67.
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


def test_the_device_that_failed_is_named_and_not_its_neighbour_that_lost_it(agents: Agents) -> None:
    late = Item(
        run_id="late",
        kind="train",
        nodes=[0, 1],
        devices=[2, 1],
        workload="later",
        batches=[2, 2],
        **LONGER,
    )  # rank 1 fails, the second device of node 0
    agents.plan(1, [workload("faulty", "later", at=4)], [late])
    ends = agents.finished(1)
    assert [one["worker_exit_code"] for one in ends] == [3, 4]
    assert "row 17 is not a number" in ends[0]["reason"] and "node 0 device 1" in ends[0]["reason"]
    assert "node 0 device 1: ValueError: row 17" in agents.records()["late"]["reason"]


def test_a_loaders_workers_serve_their_item_and_none_is_left_and_one_that_dies_is_the_items_fault(
    agents: Agents,
) -> None:
    workloads = [workload("loaded"), workload("loaded", "dying", dies_at=60), workload("two")]
    loads = Item(
        run_id="loads", kind="train", nodes=[0, 1], workload="loaded", batches=[6, 2], **QUICK
    )
    profile = Item(
        run_id="profile", kind="profile", nodes=[0], workload="loaded", batches=[4, 8, 16]
    )
    after = Item(
        run_id="after", kind="train", nodes=[0, 1], workload="two", batches=[4, 4], warmup_steps=2, least_steps=9999,
        most_steps=9999, most_s=60.0,
    )  # fmt: skip
    agents.plan(1, workloads, [loads, profile, after])
    agents.wait_for(lambda: under_way(agents.mailbox / "node-1/heartbeat.json") == "after")
    ranks = [
        one
        for agent in agents.processes
        for one in descendants(agent.pid)
        if b"node.worker" in command_line(one)
    ]
    assert len([one for one in ranks if b"torch.distributed.run" not in command_line(one)]) == 2, (
        "nobody loads now"
    )
    records = agents.records()
    assert {run: one["reason"] for run, one in records.items()} == {"loads": "", "profile": ""}
    assert (
        records["loads"]["values"]["loader_workers"] == 1
        and "load_s" in records["profile"]["values"]
    )

    dies = Item(
        run_id="dies", kind="train", nodes=[0, 1], workload="dying", batches=[5, 5], **LONGER
    )
    agents.plan(2, workloads, [dies])
    assert [one["exit_code"] != 0 for one in agents.finished(2)] == [True, True]
    assert "a worker of its loader died" in agents.records()["dies"]["reason"]
    for agent in agents.processes:
        agents.wait_for(lambda pid=agent.pid: not descendants(pid))


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
        Item(run_id="lacking", workload="wide", **both | {"batches": [6]}),
    ]
    agents.plan(1, workloads, items)
    agents.finished(1)
    records = agents.records()
    assert {run for run, one in records.items() if one["status"] == "failed"} == {
        "uneven",
        "lacking",
    }
    assert "22 steps cannot be shared among 23 windows" in records["uneven"]["reason"]
    assert records["lacking"]["reason"].endswith("1 batches for 2 nodes")
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
