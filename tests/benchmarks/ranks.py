"""Ranks of a training as processes of this machine, and hosts with links of given rates.

`served` runs what a worker does with an item, without agents or torchrun. A rank imports only what
travels to a node, so that it weighs what it weighs there, and returns freed memory at once, as a
GPU does: resident bytes would else include blocks that the C library keeps.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from tasks.node.checkpoint import write_checkpoint
from tasks.node.device import reset_peak
from tasks.node.entrypoint import build, try_once
from tasks.node.precision import Arithmetic
from tasks.node.profiler import profile
from tasks.node.record import Item, WorkloadFile
from tasks.node.repetition import Patience
from tasks.node.steps import take_step, train
from tasks.node.strategies import apply_strategy
from tasks.node.strategies.refusals import SHARDED
from tasks.node.switches import switch_on
from tasks.providers.local import network

# glibc: blocks of 64 KiB or more are returned to the kernel, and so is the free end of the heap.
_RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
ROOT = Path(__file__).parents[2]
WORKLOADS = ROOT / "tasks" / "node" / "workloads"
CPU = torch.device("cpu")
PYTHON = (sys.executable, "-W", "ignore", "-m")
_FEW, _MORE = 10, 30  # steps, whose difference in bytes leaves out joining


def workload_file(name: str, arguments: dict[str, Any] | None = None) -> WorkloadFile:
    """A built-in workload."""
    return WorkloadFile(
        name=name, digest=name, file=f"{name}.py", function="build", arguments=arguments or {}
    )


def served(
    workload: WorkloadFile, items: Sequence[Item], *, world: int, losses: int = 0
) -> list[dict[str, Any]]:
    """The first rank's values of each item on `world` ranks, one process and thread each.

    With `losses`, items are trained for so many steps, and the values are the ranks' mean losses.
    Raises RuntimeError if a rank fails.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    task = {
        "workload": asdict(workload),
        "items": [asdict(item) for item in items],
        "losses": losses,
    }
    environment = os.environ | ({} if losses else _RETURNED)
    with TemporaryDirectory() as folder:
        answers = [Path(folder) / str(rank) for rank in range(world)]
        processes = []
        for rank, answer in enumerate(answers):
            rank_task = json.dumps(task | {"world": world, "rank": rank, "port": port})
            command = [*PYTHON, "tests.benchmarks.ranks", "serve", rank_task, str(answer)]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment))
        if max(process.wait() for process in processes):
            raise RuntimeError(f"{workload.name} failed on {world} ranks")
        return [dict(answer) for answer in json.loads(answers[0].read_text())]


def serve(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Values of the task's items on this rank."""
    torch.set_num_threads(1)
    world, rank = int(task["world"]), int(task["rank"])
    address = f"tcp://127.0.0.1:{task['port']}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    workload = WorkloadFile(**task["workload"])
    for item in (Item(**item) for item in task["items"]):
        yield _values(item, workload, rank=rank, losses=int(task["losses"]))


def _values(item: Item, workload: WorkloadFile, *, rank: int, losses: int) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    reset_peak(CPU)
    shared = item.strategy in SHARDED
    computing = Arithmetic(item.precision, CPU)
    built = build(
        WORKLOADS, workload, seed=item.seed, rank=rank, computing=computing, shared=shared
    )
    switch_on(built.model, item.switches, whole=not shared)
    batch = item.batches[0]
    try_once(built, batch)
    if losses:
        module = apply_strategy(item, built.model, built.optimizer, group)
        step = partial(take_step, built, module, [batch], scale=1 / batch)
        summed = torch.tensor([step() for _ in range(losses)], dtype=torch.float64)
        dist.all_reduce(summed)
        return {"losses": (summed / dist.get_world_size()).tolist()}
    if item.kind == "profile":
        values = profile(item, built, group, Patience())
        values |= write_checkpoint(built)
    else:
        values = train(item, built, group, Patience())
    return values


def sent_a_step(name: str, strategy_name: str) -> float:
    """Bytes that one of two ranks sends in a step. Raises OSError without network namespaces."""

    def sent(steps: int) -> int:
        command = [*PYTHON, "tests.benchmarks.ranks", "sent", name, strategy_name, str(steps)]
        done = subprocess.run(
            network.without_network(network.detect(), command),
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise OSError(f"no bytes counted: {done.stderr.strip().splitlines()[-1:]}")
        return int(done.stdout.split()[-1])

    return (sent(_MORE) - sent(_FEW)) / (_MORE - _FEW) / 2


def bytes_on(interface: str) -> tuple[int, int]:
    """Bytes and packets that this namespace sent on `interface`."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    line = next(line for line in lines if line.strip().startswith(f"{interface}:"))
    sent, packets = line.split(":")[1].split()[8:10]
    return int(sent), int(packets)


def address(rank: int) -> str:
    """Address of a host of `on_hosts`."""
    return f"10.77.0.{rank + 1}"


@contextmanager
def _hosts(
    commands: Sequence[Sequence[str]], gbps: Sequence[float], folder: Path, rewire: str
) -> Iterator[list[network.Host]]:
    isolation = network.detect()
    if not isolation.namespaces:
        raise OSError(f"no hosts: {isolation.why_not}")
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    joined = network.HostNetwork(isolation, environment)
    try:
        joined.open(folder / "switch")
        hosts = [
            joined.start(
                "srift-benchmark",
                command,
                folder / f"log-{rank}",
                address=address(rank),
                bandwidth_gbps=rate,
            )
            for rank, (command, rate) in enumerate(zip(commands, gbps, strict=True))
        ]
        if rewire:
            joined.run(rewire)
        for host in hosts:
            host.go()
        yield hosts
    finally:
        joined.close()


def on_hosts(
    program: str, task: dict[str, Any], gbps: Sequence[float], *, rewire: str = ""
) -> list[Any]:
    """Run `program` as one rank a host, with links of these rates; return what each rank answers.

    A rank is started as `python -m PROGRAM rank TASK ANSWER`. `rewire` is a script for the switch.
    Raises OSError if hosts cannot be made, RuntimeError if a rank fails.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        answers = [folder / f"answer-{rank}" for rank in range(len(gbps))]
        commands = [
            (
                *(*PYTHON, program, "rank"),
                json.dumps(task | {"rank": rank, "world": len(gbps)}),
                str(answer),
            )
            for rank, answer in enumerate(answers)
        ]
        with _hosts(commands, gbps, folder, rewire) as hosts:
            while any(host.process.poll() is None for host in hosts):
                if any(host.process.poll() for host in hosts):
                    break
                time.sleep(0.1)
            failed = any(host.process.poll() for host in hosts)
        if failed:
            logs = [path.read_text().strip()[-400:] for path in folder.glob("log-*")]
            raise RuntimeError(f"a rank failed: {max(logs, key=len)}")
        return [json.loads(answer.read_text()) for answer in answers]


def join(task: dict[str, Any]) -> dist.ProcessGroup:
    """Join the process group of the ranks of `on_hosts`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address(0)}:29500",
        rank=int(task["rank"]),
        world_size=int(task["world"]),
    )
    group = dist.group.WORLD
    assert group is not None
    return group


def _print_sent(name: str, strategy_name: str, steps: int) -> None:
    before, _ = bytes_on("lo")
    item = Item(
        run_id="",
        kind="train",
        nodes=[0, 1],
        workload=name,
        batches=[2, 2],
        strategy=strategy_name,
    )
    served(workload_file(name), [item], world=2, losses=steps)
    print(bytes_on("lo")[0] - before)


if __name__ == "__main__":
    if sys.argv[1] == "sent":
        _print_sent(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        Path(sys.argv[3]).write_text(json.dumps(list(serve(json.loads(sys.argv[2])))))
