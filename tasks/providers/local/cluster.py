"""Start, watch, interrupt and end the hosts of one local cluster."""

import math
import os
import random
import shutil
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from models.domain.cluster import Cluster, Offer

from ..base import Lease, NodeState, RunningCluster, plain
from .catalogue import LocalMachine
from .cpu_shares import place, promised_to_others
from .leases import LeaseStore
from .network import Host, HostNetwork
from .processes import HostMark

_LOG_TAIL = 300  # characters
_CARRIED = ("HOME", "LANG")  # other variables may have credentials or settings of this process


class LocalCluster(RunningCluster):
    """The hosts of one launch on this computer."""

    ready_within_s = 60.0
    image_id = ""

    def __init__(
        self,
        machine: LocalMachine,
        store: LeaseStore,
        cluster: Cluster,
        lease: Lease,
        seed: int,
    ) -> None:
        self._machine, self._store, self._lease, self._seed = machine, store, lease, seed
        self._directory = store.directory(lease.lease_id)
        self.lease_id = lease.lease_id
        self.cluster = cluster
        self.mailbox = self._directory / "mailbox"
        self.checkpoints = self._directory / "checkpoints"
        self.addresses = []
        environment = {name: os.environ[name] for name in _CARRIED if name in os.environ}
        environment |= {
            "PYTHONPATH": str(self._directory / "code"),
            "TMPDIR": str(self._directory / "scratch"),
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.network = HostNetwork(machine.isolation, environment)
        self._hosts: dict[int, Host] = {}
        self._started = 0  # number of hosts started, replaced hosts included
        self._revoked: dict[int, str] = {}
        self._ends_at: dict[int, float] = {}  # each host's spot interruption, by time.monotonic

    def start(self, node_package: Path) -> None:
        """Start every host, but not yet the agents (the programs that measure on the hosts).

        The method `go` starts the agents.

        node_package: folder with the agents' code. The hosts run a copy in the lease's folder.
        Raises ProviderError or OSError if a host cannot be started. After an error, the caller must
        call `release`, because other hosts may already run.
        """
        self._machine.isolation.give(self._directory / "scratch", self._directory / "checkpoints")
        code, ignore = self._directory / "code", shutil.ignore_patterns("__pycache__")
        shutil.copytree(node_package, code / "node", ignore=ignore)
        self.network.open(self._directory / "scratch" / "switch.log")
        for index in range(len(self.cluster.members)):
            self._start_host(index)

    def go(self) -> None:
        """Start the agents."""
        for host in self._hosts.values():
            host.go()

    def settle(self) -> None:
        """Apply each host's CPU quota, and pin hosts to separate cores if there are enough."""
        shares = [offer.instance_type.cores for offer in self.cluster.members]
        self._limit(shares, place(shares, promised_to_others(self.lease_id)))

    def unsettle(self) -> None:
        self._limit([None] * len(self._hosts), [os.sched_getaffinity(0)] * len(self._hosts))

    def nodes(self) -> Sequence[NodeState]:
        """Interrupt the hosts whose simulated interruption is due. Return each host's state."""
        for index, ends_at in self._ends_at.items():
            if time.monotonic() >= ends_at:
                self.revoke(index, "revoked by the spot market")
        return list(map(self._state, self._hosts))

    def now_unix(self) -> float:
        """Return this computer's Unix time. The hosts' files are stamped with the same clock."""
        return time.time()

    def replace(self, node: int) -> bool:
        """End the host `node` and start a new host in its place, at a new address.

        Returns False, without a new host, in these cases:

        - The hosts have no separate networks.
        - The host's type does not have `spot_replaced = true` in srift.toml.

        Raises NoCapacity if too few cores are free, and ProviderError or OSError if the new host
        cannot be started.
        """
        instance = self.cluster.members[node].instance_type
        if not self._machine.specs[instance.name].spot_replaced or self.network.switch is None:
            return False
        self.revoke(node, "ended so that it could be replaced")
        self.forget(node)
        with self._store.locked():
            self._machine.refuse_if_taken(instance.cores)
            self._start_host(node)
        self._hosts[node].go()
        return True

    def usd_so_far(self) -> float | None:
        return self._lease.usd_until(datetime.now(UTC))

    def revoke(self, index: int, why: str = "revoked on request") -> None:
        """End a host and all its processes at once, as a spot interruption does.

        why: the reason in the host's `NodeState`.
        """
        host = self._hosts[index]
        if index not in self._revoked and host.process.poll() is None:
            self._revoked[index] = f"{self._label(index)}: {why}"
            host.end()

    def release(self) -> None:
        """End all hosts and the network, and wait until they are gone.

        May be called several times, and after a failed `start`.
        """
        try:
            self._store.end(self.lease_id, self._machine.shares)
        finally:
            self.network.close()

    def _start_host(self, index: int) -> None:
        """Start host `index`, or its replacement.

        Raises ProviderError or OSError if the host cannot be started.
        """
        offer = self.cluster.members[index]
        instance = offer.instance_type
        self._started += 1
        address = f"10.77.0.{self._started}" if self.network.switch else "127.0.0.1"
        self.addresses[index : index + 1] = [address]
        mark = HostMark(self._store.token, self.lease_id, index, instance.cores)
        self._machine.isolation.give(self.mailbox / f"node-{index}")
        # A process that exceeds this limit gets a memory error. A memory cgroup would kill the
        # process without a message, and an ordinary user cannot create a memory cgroup.
        limit = f"--data={round(instance.memory_gib * 2**30)}"
        command = ["prlimit", limit, self._machine.python, "-m", "node"]
        command += ["--mailbox", str(self.mailbox), "--node", str(index), "--address", address]
        command += ["--deadline", f"{self._lease.deadline_at.timestamp():.3f}"]
        host = self.network.start(
            str(mark),
            self._machine.isolation.powerless(command),
            self._log(index),
            address=address,
            bandwidth_gbps=instance.bandwidth_gbps,
        )
        self._machine.shares.add(self._name(index), {host.process.pid, host.inner.pid})
        self._hosts[index] = host
        self._revoked.pop(index, None)
        after_s = interrupted_after_s(offer, f"{self._seed}-{self._started}")
        self._ends_at[index] = time.monotonic() + after_s

    def _limit(self, shares: Sequence[float | None], placed: Sequence[set[int]]) -> None:
        """Set each host's CPU quota, and pin each host to cores.

        shares: number of cores of each host; None means no quota.
        placed: the cores to which each host is pinned.
        Raises OSError if quotas or cores cannot be set.
        """
        for index, (cores, usable) in enumerate(zip(shares, placed, strict=True)):
            processes = self._hosts[index].processes()
            self._machine.shares.settle(self._name(index), processes, cores, usable)

    def _state(self, index: int) -> NodeState:
        if index in self._revoked:
            return NodeState(alive=False, interrupted=True, reason=self._revoked[index])
        status = self._hosts[index].process.poll()
        if status is None:
            return NodeState(alive=True)
        tail = plain(self._log(index).read_text(errors="replace").strip()[-_LOG_TAIL:])
        ended = f"{self._label(index)}: its agent ended with exit status {status}: {tail}"
        return NodeState(alive=False, reason=ended)

    def _log(self, index: int) -> Path:
        return self._directory / f"host-{index}.log"

    def _name(self, index: int) -> str:
        return f"{self._store.prefix}{self.lease_id}-{index}"

    def _label(self, index: int) -> str:
        return f"host {index} ({self.cluster.members[index].instance_type.name})"


def interrupted_after_s(offer: Offer, seed: str) -> float:
    """Draw the seconds until a host is interrupted; inf if its offer has no interruptions.

    The seconds are exponentially distributed with the offer's rate of interruptions.
    """
    per_s = offer.interruptions_per_hour / 3600
    return random.Random(seed).expovariate(per_s) if per_s else math.inf
