"""Does the order in which machines send to each other, by measured links, come near the best? And is it faster?

`python -m tests.benchmarks.strategies --parts placement` (root) prints

orders    over made-up networks of 8 machines, and those measured below: seconds of a step's traffic in the order that
          is chosen from noisy measurements, against the best of all orders, breadth-first order, and as machines come
hosts     real hosts with links of such networks measure each two, choose, and all-reduce in several orders in turns

A network has a rate for each two machines, and racks whose uplinks their machines share: what a round takes in it is by
the slowest of pairs and uplinks, not by the planner's formula.

`python -m tests.benchmarks.placement TASK` is one rank of a host.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations, permutations
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from models.domain.numeric import FloatArray, IntArray
from models.planner.placement import Links, Round, breadth_first, choose, halvings, ring, searched
from tasks.execution.rank_order import sending_order
from tasks.node.measuring import gather, meet
from tasks.node.probe import SWEEPS, pairs
from tasks.node.record import Item
from tasks.providers.local import network as local_network
from tests.benchmarks.commands import ROOT

MACHINES = 8
TRAFFIC = {"ring": ring, "halvings": halvings}
SIZE = 25 * 2**20  # bytes of gradients
NOISE = 0.03  # standard deviation of a measured pair's logarithm
HOST_BYTES, HOST_REPEATS, RANDOM_ORDERS = 4 * 2**20, 7, 4
_GROUP_S = 60.0
_HOST_S = 400.0  # of all that hosts do


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Bytes a second between each two machines, seconds of an empty message, and racks with the rate of an uplink."""

    name: str
    rate: FloatArray
    latency_s: FloatArray
    rack: IntArray
    uplink: float = float("inf")

    def seconds_of(self, rounds: Sequence[Round], orders: IntArray) -> FloatArray:
        """(m,) of `rounds` in each of `orders` (m, n): of a ring, where each sends to the next, or of exchanges."""
        total = np.zeros(len(orders))
        for one in rounds:
            senders, receivers = (
                orders[:, list(places)] for places in zip(*one.places, strict=True)
            )
            round_s = (
                self.latency_s[senders, receivers] + one.bytes / self.rate[senders, receivers]
            ).max(axis=1)
            if np.isfinite(self.uplink):
                both = len(one.places) < orders.shape[1]  # of an exchange, both ways are in use
                source, target = self.rack[senders], self.rack[receivers]
                for rack in np.unique(self.rack):
                    out = ((source == rack) & (target != rack)).sum(axis=1)
                    back = ((source != rack) & (target == rack)).sum(axis=1)
                    most = out + back if both else np.maximum(out, back)
                    round_s = np.maximum(round_s, most * one.bytes / self.uplink)
            total += one.times * round_s
        return total

    def measured(self, seed: int) -> list[Links]:
        """SWEEPS of links as machines would measure them, with NOISE."""
        draw = np.random.default_rng(seed)
        byte_s = 1 / np.minimum(
            self.rate, np.where(self.rack[:, None] == self.rack, np.inf, self.uplink)
        )
        slowest = sorted(combinations(range(len(self.rate)), 2), key=lambda pair: -byte_s[pair])
        apart: list[tuple[int, int]] = []
        for pair in slowest:
            if not any(set(pair) & set(other) for other in apart):
                apart.append(pair)
        alone = np.array([byte_s[pair] for pair in apart])
        crossing = [sum(self.rack[i] != self.rack[j] and rack in (self.rack[i], self.rack[j]) for i, j in apart)
                    for rack in np.unique(self.rack)]  # fmt: skip
        at_once = max(alone.max(), max(crossing) / self.uplink)
        sharing = float(np.clip((at_once - alone.max()) / (alone.sum() - alone.max()), 0, 1))

        def noisy(values: FloatArray) -> FloatArray:
            found = np.triu(values * np.exp(NOISE * draw.standard_normal(values.shape)), 1)
            return found + found.T

        return [
            Links(latency_s=noisy(self.latency_s), byte_s=noisy(byte_s), sharing=sharing)
            for _ in range(SWEEPS)
        ]


def networks(seeds: Iterable[int]) -> list[Network]:
    """Of each seed two racks, three racks, one slow machine, rates apart at random, and all alike; machines come in any
    order."""
    found = []
    latency_s = np.full((MACHINES, MACHINES), 1e-4)
    for seed in seeds:
        draw = np.random.default_rng(seed)
        fast = np.full((MACHINES, MACHINES), 1.25e9)
        mixed = draw.permutation(MACHINES)
        alone = np.zeros(MACHINES, dtype=np.intp)
        uplink = 1.25e9 / draw.choice([2, 4, 8])
        plain: dict[str, Any] = {"latency_s": latency_s, "rate": fast}
        found.append(Network(name="two racks", rack=mixed % 2, uplink=uplink, **plain))
        found.append(Network(name="three racks", rack=mixed % 3, uplink=uplink, **plain))
        slow = fast.copy()
        slow[mixed[0]] = slow[:, mixed[0]] = uplink
        found.append(Network(name="one slow machine", rack=alone, rate=slow, latency_s=latency_s))
        spread = np.triu(np.exp(draw.normal(0.0, 0.7, fast.shape)), 1)
        found.append(Network(name="random", rack=alone, rate=fast * (spread + spread.T + np.eye(MACHINES)),
                             latency_s=latency_s))  # fmt: skip
        found.append(Network(name="all alike", rack=alone, **plain))
    return found


def orders_of(found: Sequence[Network]) -> pd.DataFrame:
    """A row a network and kind of traffic: seconds in its orders, by the network itself.

    `over_best` is of the chosen order over the best of all, less 1, and `searched_over_best` that of the local search,
    which serves more machines; `breadth_first` and `as_they_come` are seconds of these over the chosen order's.
    """
    rows = []
    for seed, one in enumerate(found):
        sweeps = one.measured(seed)
        every = np.array(list(permutations(range(len(one.rate)))))
        middle = Links(
            latency_s=np.median([sweep.latency_s for sweep in sweeps], axis=0),
            byte_s=np.median([sweep.byte_s for sweep in sweeps], axis=0),
            sharing=sweeps[0].sharing,
        )
        for kind, traffic in TRAFFIC.items():
            rounds = traffic(len(one.rate), SIZE)
            choice = choose(sweeps, rounds)
            asked = [
                choice.order,
                searched(middle, rounds),
                breadth_first(middle),
                tuple(range(len(one.rate))),
            ]
            chosen_s, searched_s, breadth_s, comes_s = one.seconds_of(rounds, np.array(asked))
            best_s = one.seconds_of(rounds, every).min()
            row = {"network": one.name, "traffic": kind, "over_best": chosen_s / best_s - 1}
            row |= {
                "searched_over_best": searched_s / best_s - 1,
                "breadth_first": breadth_s / chosen_s,
            }
            rows.append(
                row | {"as_they_come": comes_s / chosen_s, "changed": choice.order != asked[-1]}
            )
    return pd.DataFrame(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Real hosts of a network: Gbit/s of each, racks and their uplinks, and rates of pairs that are slower."""

    name: str
    gbps: tuple[float, ...]
    rack: tuple[int, ...]
    uplink_gbps: float = 0.0
    pairs_gbps: tuple[tuple[int, int, float], ...] = ()  # two hosts and their rate


def host_networks(seed: int) -> list[Hosts]:
    """Two and three racks, rates apart at random, and one slow host."""
    draw = np.random.default_rng(seed)
    alike, one_rack = (0.4,) * MACHINES, (0,) * MACHINES
    racks = [tuple(int(one) for one in draw.permutation(MACHINES) % many) for many in (2, 3)]
    apart = tuple(
        (*pair, float(0.2 * np.exp(draw.normal(0.0, 0.7))))
        for pair in combinations(range(MACHINES), 2)
    )
    late = int(draw.integers(MACHINES))
    slow = tuple(0.1 if host == late else 0.4 for host in range(MACHINES))
    return [
        Hosts(name="two racks", gbps=alike, rack=racks[0], uplink_gbps=0.1),
        Hosts(name="three racks", gbps=alike, rack=racks[1], uplink_gbps=0.1),
        Hosts(name="random", gbps=(2.0,) * MACHINES, rack=one_rack, pairs_gbps=apart),
        Hosts(name="one slow host", gbps=slow, rack=one_rack),
    ]


def rewired(hosts: Hosts) -> str:
    """A script for the switch: racks as bridges with shaped uplinks to the first one; rates of pairs at each host."""
    lines = ["set -e"]
    racks = sorted(set(hosts.rack))
    shaped = f"tbf rate {hosts.uplink_gbps * 1000:g}mbit burst 65536b latency 50ms"
    for rack in racks if len(racks) > 1 else ():
        lines += [f"ip link add r{rack} type bridge", f"ip link set r{rack} up"]
        lines += [
            f"ip link add u{rack} type veth peer name d{rack}",
            f"ip link set u{rack} master br0 up",
        ]
        lines += [f"ip link set d{rack} master r{rack} up"]
        lines += [f"tc qdisc add dev {end}{rack} root {shaped}" for end in "ud"]
        lines += [
            f"ip link set h{index} master r{rack}"
            for index, own in enumerate(hosts.rack)
            if own == rack
        ]
    for index in range(len(hosts.rack)) if hosts.pairs_gbps else ():
        lines += [f"tc qdisc replace dev h{index} root handle 1: htb default 99"]
        for one, other, gbps in hosts.pairs_gbps:
            if index in (one, other):
                peer = one + other - index + 1
                lines += [
                    f"tc class add dev h{index} parent 1: classid 1:{peer} htb rate {gbps * 1000:.1f}mbit burst 65536b"
                    " quantum 15140",
                    f"tc filter add dev h{index} parent 1: protocol ip u32 match ip src {_address(peer - 1)}/32"
                    f" flowid 1:{peer}",
                ]
    return "\n".join(lines)


def _address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def on_hosts(hosts: Hosts, seed: int) -> dict[str, Any]:
    """What the first rank found on real hosts with such links. Raises OSError where they cannot be made, or fail."""
    isolation = local_network.detect()
    if not isolation.namespaces:
        raise OSError(f"no hosts: {isolation.why_not}")
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    with TemporaryDirectory() as folder:
        answer, log = Path(folder) / "answer.json", Path(folder) / "host.log"
        switch = local_network.start_switch(isolation, environment, Path(folder) / "switch.log")
        started: list[tuple[local_network.Host, local_network.HostPlan]] = []
        try:
            for rank, gbps in enumerate(hosts.gbps):
                task = {"rank": rank, "world": len(hosts.gbps), "seed": seed, "answer": str(answer)}
                command = (
                    sys.executable,
                    "-W",
                    "ignore",
                    "-m",
                    "tests.benchmarks.placement",
                    json.dumps(task),
                )
                plan = local_network.HostPlan(
                    mark="srift-placement",
                    address=_address(rank),
                    bandwidth_gbps=gbps,
                    command=command,
                    log=log,
                )
                started.append(
                    (local_network.start_host(isolation, switch, plan, environment), plan)
                )
            for host, _ in started:
                local_network.find_inner(host)
            local_network.join(isolation, switch, started)
            user = ("-U", "--preserve-credentials") if isolation.kind == "user" else ()
            subprocess.run(
                ("nsenter", "-t", str(switch.pid), *user, "-n", "sh", "-c", rewired(hosts)),
                check=True, env={"PATH": local_network.PATH},
            )  # fmt: skip
            for host, _ in started:
                host.go()
            until = time.monotonic() + _HOST_S
            for host, _ in started:
                if host.process.wait(max(1.0, until - time.monotonic())):
                    raise OSError(f"hosts of {hosts.name} failed: {log.read_text()[-2000:]}")
            return dict(json.loads(answer.read_text()))
        finally:
            for process in [host.process for host, _ in started] + [switch]:
                process.kill()
                process.wait()


def serve(task: Mapping[str, Any]) -> None:
    """One rank: links measured, an order chosen as a controller does, and all-reduces in several orders in turns."""
    torch.set_num_threads(1)
    rank, world = int(task["rank"]), int(task["world"])
    timeout = timedelta(seconds=_GROUP_S)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{_address(0)}:29500",
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    nodes = list(range(world))
    base = dist.new_group(nodes, timeout=timeout)
    said = pairs(base) | {"nodes": nodes}
    order, reason = sending_order(said, nodes, [Item(run_id="", kind="probe", nodes=nodes)])
    middle = Links(
        latency_s=np.median(said["latency_s"], axis=0),
        byte_s=np.median(said["byte_s"], axis=0),
        sharing=0.0,
    )
    draw = np.random.default_rng(task["seed"])
    orders = {
        "chosen": list(order) or nodes,
        "as they come": nodes,
        "breadth first": list(breadth_first(middle)),
    }
    orders |= {
        f"random {place}": [int(one) for one in draw.permutation(world)]
        for place in range(RANDOM_ORDERS)
    }
    agreed: list[Any] = [orders]
    dist.broadcast_object_list(agreed)
    groups = {
        name: dist.new_group(own, timeout=timeout, sort_ranks=False)
        for name, own in agreed[0].items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    message = torch.zeros(HOST_BYTES // 4)
    for repeat in range(HOST_REPEATS + 1):
        names = [*groups][repeat % len(groups) :] + [*groups][: repeat % len(groups)]
        for name, group in ((name, groups[name]) for name in names):
            meet(base)
            before = time.monotonic()
            dist.all_reduce(message, group=group)
            took_s = max(one[0] for one in gather([time.monotonic() - before], base))
            if repeat:  # the first fills what links let through at once
                seconds[name].append(took_s)
    if rank == 0:
        found = {"pairs": said, "orders": agreed[0], "seconds": seconds, "reason": reason}
        Path(task["answer"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def host_rows(hosts: Hosts, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row an order: median seconds of an all-reduce, how far its repeats are apart, and over the chosen order's."""
    chosen_s = median(found["seconds"]["chosen"])
    return [
        {
            "hosts": hosts.name,
            "order": name,
            "machines": " ".join(map(str, found["orders"][name])),
            "seconds": median(own),
            "apart": (max(own) - min(own)) / median(own),
            "over_chosen": median(own) / chosen_s,
        }
        for name, own in found["seconds"].items()
    ]


def as_network(hosts: Hosts, found: Mapping[str, Any]) -> Network:
    """What real hosts measured, as a network to choose orders for; uplinks are as stated."""
    latency_s, byte_s = (
        np.median(found["pairs"][name], axis=0) for name in ("latency_s", "byte_s")
    )
    rate = 1 / np.where(np.eye(len(byte_s), dtype=bool), 1.0, byte_s)
    uplink = hosts.uplink_gbps * 1e9 / 8 or float("inf")
    return Network(
        name=f"measured, {hosts.name}",
        rate=rate,
        latency_s=latency_s,
        rack=np.array(hosts.rack, dtype=np.intp),
        uplink=uplink,
    )


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
