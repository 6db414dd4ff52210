"""Does the order in which machines send to each other come near the best, and is it faster?

Over synthetic networks of 8 machines: seconds of a step's traffic in the order chosen from noisy
measurements, against the best of all orders, breadth-first order, and the machines' own. On real
hosts with such links (root): all-reduces in several orders in turns. A round in a network takes as
long as its slowest pair or rack uplink, not as the planner's formula says.
"""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import typer

from models.domain.numeric import FloatArray, IntArray
from models.planner.placement import Links, Round, choose, halvings, ring
from tasks.execution.rank_order import sending_order
from tasks.node.probe import SWEEPS, pairs
from tasks.node.record import Item
from tasks.node.repetition import meet
from tasks.node.strategies.replicas import of_ranks
from tests.benchmarks.claims import Claim, Write, report, show
from tests.benchmarks.ranks import address, join, on_hosts

MACHINES, SEEDS = 8, 5
TRAFFIC = {"ring": ring, "halvings": halvings}
SIZE = 25 * 2**20  # bytes of gradients
NOISE = 0.03  # standard deviation of a measured pair's log
HOST_BYTES, HOST_REPEATS = 4 * 2**20, 7
CHOSEN, COMES, BREADTH = "chosen", "as they come", "breadth first"


def breadth_first(links: Links) -> tuple[int, ...]:
    """Return the first machine, then those with the fastest links to it."""
    return (0, *(int(place) for place in np.argsort(links.byte_s[0], kind="stable") if place))


@dataclass(frozen=True, kw_only=True)
class Network:
    """Bytes a second and seconds of an empty message by pair; racks, and the rate of an uplink."""

    name: str
    rate: FloatArray
    latency_s: FloatArray
    rack: IntArray
    uplink: float = float("inf")

    def seconds_of(self, rounds: Sequence[Round], orders: IntArray) -> FloatArray:
        """(m,) seconds of `rounds` in each of `orders` (m, n)."""
        total = np.zeros(len(orders))
        for phase in rounds:
            sending, receiving = zip(*phase.places, strict=True)
            source, target = orders[:, list(sending)], orders[:, list(receiving)]
            pair_s = self.latency_s[source, target] + phase.bytes / self.rate[source, target]
            round_s = pair_s.max(axis=1)
            if np.isfinite(self.uplink):
                exchanged = len(phase.places) < orders.shape[1]  # both ways are in use
                racks = self.rack[source], self.rack[target]
                for rack in np.unique(self.rack):
                    out = ((racks[0] == rack) & (racks[1] != rack)).sum(axis=1)
                    back = ((racks[0] != rack) & (racks[1] == rack)).sum(axis=1)
                    most = out + back if exchanged else np.maximum(out, back)
                    round_s = np.maximum(round_s, most * phase.bytes / self.uplink)
            total += phase.times * round_s
        return total

    def measured(self, seed: int) -> list[Links]:
        """SWEEPS of links as machines measure them, with NOISE."""
        random = np.random.default_rng(seed)
        crossing = self.rack[:, None] != self.rack
        byte_s = 1 / np.where(crossing, np.minimum(self.rate, self.uplink), self.rate)
        apart: list[tuple[int, int]] = []
        slowest = sorted(combinations(range(len(self.rate)), 2), key=lambda pair: -byte_s[pair])
        for pair in slowest:
            if not {place for other in apart for place in other} & set(pair):
                apart.append(pair)
        alone = np.array([byte_s[pair] for pair in apart])
        loads = [
            sum(crossing[i, j] and rack in (self.rack[i], self.rack[j]) for i, j in apart)
            for rack in np.unique(self.rack)
        ]
        together = max(alone.max(), max(loads) / self.uplink)
        sharing = float(np.clip((together - alone.max()) / (alone.sum() - alone.max()), 0, 1))

        def noisy(values: FloatArray) -> FloatArray:
            found = np.triu(values * np.exp(NOISE * random.standard_normal(values.shape)), 1)
            return found + found.T

        return [
            Links(latency_s=noisy(self.latency_s), byte_s=noisy(byte_s), sharing=sharing)
            for _ in range(SWEEPS)
        ]


def networks(seeds: Iterable[int]) -> list[Network]:
    """Of each seed: two and three racks, one slow machine, random rates, and all alike."""
    found = []
    same_rack = np.zeros(MACHINES, dtype=np.intp)
    latency_s = np.full((MACHINES, MACHINES), 1e-4)
    fast = np.full((MACHINES, MACHINES), 1.25e9)
    for seed in seeds:
        random = np.random.default_rng(seed)
        mixed = random.permutation(MACHINES)
        uplink = 1.25e9 / random.choice([2, 4, 8])
        slow = fast.copy()
        slow[mixed[0]] = slow[:, mixed[0]] = uplink
        spread = np.triu(np.exp(random.normal(0.0, 0.7, fast.shape)), 1)
        rates = {"one slow machine": slow, "all alike": fast}
        rates["random"] = fast * (spread + spread.T + np.eye(MACHINES))
        for racks, name in ((2, "two racks"), (3, "three racks")):
            rack = mixed % racks
            found.append(
                Network(name=name, rate=fast, latency_s=latency_s, rack=rack, uplink=uplink)
            )
        for name, rate in rates.items():
            found.append(Network(name=name, rate=rate, latency_s=latency_s, rack=same_rack))
    return found


def orders_of(found: Sequence[Network]) -> pd.DataFrame:
    """A row a network and kind of traffic: chosen over the best, others over the chosen order."""
    rows = []
    for seed, network in enumerate(found):
        sweeps = network.measured(seed)
        every = np.array(list(permutations(range(len(network.rate)))))
        breadth, comes = breadth_first(_middle(sweeps)), tuple(range(len(network.rate)))
        for kind, traffic in TRAFFIC.items():
            rounds = traffic(len(network.rate), SIZE)
            order, _ = choose(sweeps, rounds)
            orders = np.array([order, breadth, comes])
            chosen_s, breadth_s, comes_s = network.seconds_of(rounds, orders)
            over = chosen_s / network.seconds_of(rounds, every).min() - 1
            ratios = (breadth_s / chosen_s, comes_s / chosen_s)
            rows.append((network.name, kind, over, *ratios, order != comes))
    names = ["network", "traffic", "over_best", "breadth_first", "as_they_come", "changed"]
    return pd.DataFrame(rows, columns=names)


def _middle(sweeps: Sequence[Links]) -> Links:
    return Links(
        latency_s=np.median([sweep.latency_s for sweep in sweeps], axis=0),
        byte_s=np.median([sweep.byte_s for sweep in sweeps], axis=0),
        sharing=sweeps[0].sharing,
    )


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Real hosts of a network: Gbit/s of each, racks and their uplinks, rates of slower pairs."""

    name: str
    gbps: tuple[float, ...]
    rack: tuple[int, ...]
    uplink_gbps: float = 0.0
    pairs_gbps: dict[tuple[int, int], float] = field(default_factory=dict)


def host_networks(seed: int) -> list[Hosts]:
    """Two and three racks, random rates, and one slow host."""
    random = np.random.default_rng(seed)
    alike, same_rack = (0.4,) * MACHINES, (0,) * MACHINES
    racks = [tuple((random.permutation(MACHINES) % count).tolist()) for count in (2, 3)]
    every = combinations(range(MACHINES), 2)
    pairs_gbps = {pair: float(0.2 * np.exp(random.normal(0.0, 0.7))) for pair in every}
    late = int(random.integers(MACHINES))
    slow = tuple(0.1 if host == late else 0.4 for host in range(MACHINES))
    fast = (2.0,) * MACHINES
    return [
        Hosts(name="two racks", gbps=alike, rack=racks[0], uplink_gbps=0.1),
        Hosts(name="three racks", gbps=alike, rack=racks[1], uplink_gbps=0.1),
        Hosts(name="random", gbps=fast, rack=same_rack, pairs_gbps=pairs_gbps),
        Hosts(name="one slow host", gbps=slow, rack=same_rack),
    ]


def rewired(hosts: Hosts) -> str:
    """A script for the switch: racks as bridges with shaped uplinks, and rates of pairs."""
    lines = ["set -e"]
    racks = sorted(set(hosts.rack))
    shaped = f"tbf rate {hosts.uplink_gbps * 1000:g}mbit burst 65536b latency 50ms"
    for rack in racks if len(racks) > 1 else ():
        lines += [f"ip link add r{rack} type bridge", f"ip link set r{rack} up"]
        lines.append(f"ip link add u{rack} type veth peer name d{rack}")
        lines.append(f"ip link set u{rack} master br0 up")
        lines.append(f"ip link set d{rack} master r{rack} up")
        lines += [f"tc qdisc add dev {end}{rack} root {shaped}" for end in "ud"]
        members = [index for index, place in enumerate(hosts.rack) if place == rack]
        lines += [f"ip link set h{index} master r{rack}" for index in members]
    for index in range(len(hosts.rack)) if hosts.pairs_gbps else ():
        lines.append(f"tc qdisc replace dev h{index} root handle 1: htb default 99")
        for pair, gbps in hosts.pairs_gbps.items():
            if index in pair:
                peer = sum(pair) - index
                rate = f"htb rate {gbps * 1000:.1f}mbit burst 65536b quantum 15140"
                lines.append(f"tc class add dev h{index} parent 1: classid 1:{peer + 1} {rate}")
                match = f"u32 match ip src {address(peer)}/32 flowid 1:{peer + 1}"
                lines.append(f"tc filter add dev h{index} parent 1: protocol ip {match}")
    return "\n".join(lines)


def serve(task: dict[str, Any]) -> dict[str, Any]:
    """One rank: measure links, choose an order as a controller does, all-reduce in each order."""
    base = join(task)
    rank, nodes = int(task["rank"]), list(range(int(task["world"])))
    found = pairs(base) | {"nodes": nodes}
    order, _ = sending_order(found, nodes, [Item(run_id="", kind="probe", nodes=nodes)])
    latency_s, byte_s = (np.median(found[name], axis=0) for name in ("latency_s", "byte_s"))
    breadth = breadth_first(Links(latency_s=latency_s, byte_s=byte_s, sharing=0.0))
    orders: list[Any] = [{CHOSEN: list(order) or nodes, COMES: nodes, BREADTH: list(breadth)}]
    dist.broadcast_object_list(orders)
    groups = {name: dist.new_group(order, sort_ranks=False) for name, order in orders[0].items()}
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    message = torch.zeros(HOST_BYTES // 4)
    for repeat in range(HOST_REPEATS + 1):
        for name, group in groups.items():
            meet(base)
            started = time.monotonic()
            dist.all_reduce(message, group=group)
            took_s = max(of_ranks(time.monotonic() - started, base))
            if repeat:  # the first fills the links' bursts
                seconds[name].append(took_s)
    dist.barrier()
    dist.destroy_process_group()
    return seconds if rank == 0 else {}


def main(seed: int = 0, write: Write = False) -> None:
    """Print orders over synthetic networks, and all-reduces of real hosts."""
    table = orders_of(networks(range(SEEDS)))
    show("orders of 8 machines", table.groupby(["network", "traffic"]).mean().reset_index())
    worst, mean = float(table["over_best"].max()), float(table["over_best"].mean())
    result = f"mean {mean:.1%}, worst {worst:.1%}"
    claims = [Claim("chosen order over the best of 40,320", "5 %", result, worst <= 0.05)]
    gain = float(table["breadth_first"][table["changed"]].mean())
    claims.append(Claim("breadth-first over the chosen order", "1 time", f"{gain:.2f}", gain > 1))
    for hosts in host_networks(seed):
        answers = on_hosts("tests.benchmarks.placement", {}, hosts.gbps, rewire=rewired(hosts))
        seconds = {name: median(times_s) for name, times_s in answers[0].items()}
        spreads = [
            (max(times_s) - min(times_s)) / median(times_s) for times_s in answers[0].values()
        ]
        ratios = {name: seconds[name] / seconds[CHOSEN] for name in (BREADTH, COMES)}
        shown = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        result = f"{shown} (noise {max(spreads):.0%})"
        met = min(ratios.values()) >= 1 - max(spreads)
        claims.append(Claim(f"8 hosts, {hosts.name}: over the chosen order", "1", result, met))
    report("placement", claims, write=write)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        Path(sys.argv[3]).write_text(json.dumps(serve(json.loads(sys.argv[2]))))
    else:
        typer.run(main)
