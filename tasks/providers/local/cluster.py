"""One acquired local cluster: starting its hosts, watching and revoking them, and leaving nothing
behind.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen

from models.domain.cluster import Cluster
from tasks.providers.base import NoCapacity, NodeState, ProviderError, RunningCluster
from tasks.providers.local import network as local_hosts
from tasks.providers.local.cpu_shares import CpuShares, members, pin, place, promised_to_others
from tasks.providers.local.leases import LeaseStore, LocalLease
from tasks.providers.local.network import Host, HostPlan, Isolation
from tasks.providers.local.processes import HostMark, end, identify

_LOG_TAIL = 300  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the leases of one provider share. `python` runs the agents from a copy of
    `node_package`.

    `replaced`: types whose lost spot hosts can be replaced. `refuse_if_taken` raises NoCapacity if
    other hosts leave less than that many cores.
    """

    store: LeaseStore
    isolation: Isolation
    shares: CpuShares
    node_package: Path
    python: str
    environment: dict[str, str]
    replaced: frozenset[str]
    refuse_if_taken: Callable[[float], None]


class LocalCluster(RunningCluster):
    """A RunningCluster of local hosts. Several threads may use it."""

    ready_within_s = 60.0
    image_id = ""

    def __init__(
        self, around: Surroundings, cluster: Cluster, lease: LocalLease, seed: int
    ) -> None:
        self._around = around
        self._lease = lease
        self._directory = around.store.directory(lease.lease_id)
        self.lease_id = lease.lease_id
        self.cluster = cluster
        self.mailbox = self._directory / "mailbox"
        self.checkpoints: Path | None = self._directory / "checkpoints"
        count = len(cluster.members)
        self.addresses = (
            [f"10.77.0.{i + 1}" for i in range(count)]
            if around.isolation.namespaces
            else ["127.0.0.1"]
        )
        self._switch: Popen[bytes] | None = None
        self._hosts: list[Host] = []
        self._before: list[Host] = []  # in whose places others are
        self._seed, self._started = seed, count
        self._revoked: dict[int, str] = {}
        self._lock = threading.Lock()
        self._ending = (
            threading.RLock()
        )  # a host in the place of one that is being ended must not be ended with it
        self._over = threading.Event()
        self._began = time.monotonic()

    def start(self) -> None:
        """Start every host, join them and let their agents go. Raises ProviderError or OSError;
        then `release`.
        """
        around, directory = self._around, self._directory
        scratch = directory / "scratch"
        scratch.mkdir()
        self.mailbox.mkdir()
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(around.node_package, directory / "code" / "node", ignore=ignored)
        environment = self._environment()
        if around.isolation.namespaces:
            self._switch = local_hosts.start_switch(
                around.isolation, environment, scratch / "switch.log"
            )
        plans = [self._plan(index) for index in range(len(self.cluster.members))]
        for plan in plans:
            self._hosts.append(
                local_hosts.start_host(around.isolation, self._switch, plan, environment)
            )
        for host in self._hosts:
            local_hosts.find_inner(host)
        self._record()
        for index, host in enumerate(self._hosts):
            around.shares.add(
                self._name(index), host.pids, self.cluster.members[index].instance_type.cores
            )
        if self._switch is not None:
            local_hosts.join(
                around.isolation, self._switch, list(zip(self._hosts, plans, strict=True))
            )

    def go(self) -> None:
        """Let the agents start. From here on money runs and spot hosts may be taken away."""
        self._began = time.monotonic()
        for host in self._hosts:
            host.go()
        for index, after_s in draw_revocations(self.cluster, self._seed).items():
            self._revoke_later(index, after_s)

    def settle(self) -> None:
        """Put the CPU shares in force, each on its own cores as far as they go."""
        shares = [offer.instance_type.cores for offer in self.cluster.members]
        placed = place(shares, promised_to_others(self.lease_id))
        for index, cores in enumerate(shares):
            self._share(index, cores, placed[index])

    def unsettle(self) -> None:
        for index in range(len(self.cluster.members)):
            self._share(index, None, os.sched_getaffinity(0))

    def nodes(self) -> Sequence[NodeState]:
        return [self._state(index) for index in range(len(self.cluster.members))]

    def now_unix(self) -> float:
        """This machine's clock: the mailbox lies on it."""
        return time.time()

    def replace(self, node: int) -> bool:
        """Start another host, at another address, where srift.toml allows it."""
        around, offer = self._around, self.cluster.members[node]
        if offer.instance_type.name not in around.replaced or self._switch is None:
            return False
        self.revoke(node, "let go for another in its place")
        try:
            with self._ending, around.store.locked():
                around.refuse_if_taken(offer.instance_type.cores)
                self._start_another(node)
        except NoCapacity:
            return False
        except OSError as error:
            raise ProviderError(f"another host could not be started: {error}") from error
        drawn = draw_revocations(self.cluster, self._seed + self._started).get(node)
        if drawn is not None:
            self._revoke_later(node, drawn)
        return True

    def _start_another(self, node: int) -> None:
        """Start a host in the place of a lost one. Raises ProviderError, OSError."""
        around, name = self._around, self._name(node)
        self.addresses[node] = f"10.77.0.{self._started + 1}"
        plan = self._plan(node)
        host = local_hosts.start_host(around.isolation, self._switch, plan, self._environment())
        with self._lock:
            self._before.append(self._hosts[node])
            self._hosts[node] = host
            self._revoked.pop(node, None)
        local_hosts.find_inner(host)
        self._record()
        around.shares.add(name, host.pids, self.cluster.members[node].instance_type.cores)
        if self._switch is not None:
            local_hosts.join(around.isolation, self._switch, [(host, plan)], first=self._started)
        self._started += 1
        host.go()

    def _environment(self) -> dict[str, str]:
        """The variables of the agents."""
        directory = self._directory
        own = {
            "PYTHONPATH": str(directory / "code"),
            "TMPDIR": str(directory / "scratch"),
            "CUDA_VISIBLE_DEVICES": "",
        }
        return {**self._around.environment, **own}

    def usd_so_far(self) -> float | None:
        """Dollars since the agents were let go."""
        price = self.cluster.usd_per_hour
        return None if price is None else price * (time.monotonic() - self._began) / 3600

    def revoke(self, index: int, why: str = "revoked on request") -> None:
        """Take a host away as a spot market does: at once, with everything that runs on it."""
        with self._ending:
            with self._lock:
                host = self._hosts[index]
                if index in self._revoked or host.process.poll() is not None:
                    return
                self._revoked[index] = f"host {index} ({self._type(index)}): {why}"
            end([process for pid in host.pids if (process := identify(pid)) is not None])
            group = self._around.shares.group(self._name(index))
            if group is not None:
                end(members(group))

    def release(self) -> None:
        """End all that was started and wait until it is gone. May be called at any stage, and
        again.
        """
        self._over.set()
        try:
            self._around.store.end(self.lease_id, self._around.shares)
        finally:
            # Those just started may not be recorded yet: they are our children, so their numbers
            # are still theirs.
            started = [host.process for host in [*self._hosts, *self._before]] + (
                [self._switch] if self._switch else []
            )
            for process in started:
                if process.poll() is None:
                    process.kill()
            for process in started:
                if process.stdin is not None:
                    with suppress(BrokenPipeError):
                        process.stdin.close()
                process.wait()

    def _plan(self, index: int) -> HostPlan:
        instance, address = self.cluster.members[index].instance_type, self.addresses[index]
        mark = HostMark(
            home=self._around.store.token, lease_id=self.lease_id, index=index, cores=instance.cores
        )
        agent = (
            self._around.python,
            "-m",
            "node",
            "--mailbox",
            str(self.mailbox),
            "--node",
            str(index),
        )
        deadline = f"{self._lease.deadline_at.timestamp():.3f}"
        return HostPlan(
            mark=str(mark),
            address=address,
            bandwidth_gbps=instance.bandwidth_gbps,
            command=(*agent, "--address", address, "--deadline", deadline),
            log=self._log(index),
        )

    def _record(self) -> None:
        pids = [pid for host in self._hosts for pid in host.pids] + (
            [self._switch.pid] if self._switch else []
        )
        processes = tuple(process for pid in pids if (process := identify(pid)) is not None)
        groups = [self._around.shares.group(self._name(index)) for index in range(len(self._hosts))]
        names = tuple(str(group) for group in groups if group is not None)
        self._lease = replace(self._lease, processes=processes, groups=names)
        self._around.store.write(self._lease)

    def _share(self, index: int, cores: float | None, pinned_to: set[int]) -> None:
        """Set a quota of `cores`, or none, and pin the host."""
        name, shares = self._name(index), self._around.shares
        try:
            shares.settle(name, cores)
        except OSError as error:
            raise ProviderError(f"the CPU share of host {index} cannot be set: {error}") from error
        if (group := shares.group(name)) is not None:
            pin(members(group), pinned_to)

    def _state(self, index: int) -> NodeState:
        with self._lock:
            if index in self._revoked:
                return NodeState(alive=False, interrupted=True, reason=self._revoked[index])
        what = f"host {index} ({self._type(index)})"
        status = self._hosts[index].process.poll()
        if status is not None:
            return NodeState(
                alive=False,
                reason=f"{what}: its agent ended with exit status {status}{self._tail(index)}",
            )
        if self._switch is not None and self._switch.poll() is not None:
            return NodeState(
                alive=False,
                reason=f"{what}: the switch between the hosts ended, and their links with it",
            )
        return NodeState(alive=True)

    def _tail(self, index: int) -> str:
        try:
            text = self._log(index).read_text(errors="replace").strip()
        except OSError:
            return ""
        return f": {text[-_LOG_TAIL:]}" if text else ""

    def _revoke_later(self, index: int, after_s: float) -> None:
        """Take away the host that is in this place now, unless it is gone before."""
        host = self._hosts[index]

        def revoke() -> None:
            if (
                not self._over.wait(min(after_s, threading.TIMEOUT_MAX))
                and self._hosts[index] is host
            ):
                self.revoke(index, f"revoked by the spot market after {after_s:.0f} s")

        threading.Thread(target=revoke, name=f"spot-{self.lease_id}-{index}", daemon=True).start()

    def _log(self, index: int) -> Path:
        return self._directory / f"host-{index}.log"

    def _name(self, index: int) -> str:
        return f"{self._around.store.prefix}{self.lease_id}-{index}"

    def _type(self, index: int) -> str:
        return self.cluster.members[index].instance_type.name


def draw_revocations(cluster: Cluster, seed: int) -> dict[int, float]:
    """Draw when each spot host is taken away: exponential, at its offer's interruptions an hour."""
    source = random.Random(seed)
    draws = {index: source.expovariate(1.0) for index in range(len(cluster.members))}
    return {
        index: draws[index] * 3600 / offer.interruptions_per_hour
        for index, offer in enumerate(cluster.members)
        if offer.market == "spot" and offer.interruptions_per_hour > 0
    }
