"""Determine which local instance types and clusters fit on this computer."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import cached_property

from models.domain.cluster import Cluster, InstanceType, Offer

from ..base import NoCapacity
from . import cpu_shares as local_cpu
from . import network as local_hosts
from .processes import hosts
from .settings import LocalInstanceType

SPARE_CORES = 0.25  # reserved for the controller (the process that starts hosts) and the system


class LocalMachine:
    """This computer, which provides the local instance types of `srift.toml`.

    python: the interpreter of the agents (the programs that measure on the hosts).
    """

    def __init__(self, instance_types: Mapping[str, LocalInstanceType], python: str) -> None:
        self.specs = instance_types
        self.python = python

    @cached_property
    def isolation(self) -> local_hosts.Isolation:
        """Return how this computer separates hosts."""
        return local_hosts.detect()

    @cached_property
    def shares(self) -> local_cpu.CpuShares:
        """Return how this computer enforces CPU quotas."""
        return local_cpu.detect()

    def instance_types(self) -> list[InstanceType]:
        """Return the types that fit on this computer and whose CPU quota can be enforced."""
        return [
            InstanceType(
                name=name,
                provider="local",
                devices=1,
                device="cpu",
                cores=spec.cores,
                memory_gib=spec.memory_gib,
                device_memory_gib=spec.memory_gib,
                bandwidth_gbps=spec.bandwidth_gbps,
            )
            for name, spec in self.specs.items()
            if not self._why_not(name)
        ]

    def offers(self, now: datetime) -> list[Offer]:
        """Return an on-demand and a spot offer for each type, at the prices of `srift.toml`."""
        found: list[Offer] = []
        for kind in self.instance_types():
            spec = self.specs[kind.name]
            on_demand = Offer(
                instance_type=kind,
                market="on-demand",
                zone="local-a",
                region="local",
                usd_per_hour=spec.usd_per_hour,
                interruptions_per_hour=0.0,
                price_as_of=now,
            )
            spot = replace(
                on_demand,
                market="spot",
                usd_per_hour=spec.spot_usd_per_hour,
                interruptions_per_hour=spec.spot_interruptions_per_hour,
                interruption_source="as srift.toml states",
            )
            found += [on_demand, spot]
        return found

    def limits(self) -> list[str]:
        """Return a sentence for each limit of this computer, with the reason.

        For example, it may be unable to run clusters of several hosts, or types with many cores.
        """
        sentences = []
        if not self.isolation.namespaces:
            sentences.append(
                "Only setups with one host are measured: network namespaces are not available here"
                f" ({self.isolation.why_not}). Run as root, or allow user namespaces (sysctl"
                " kernel.unprivileged_userns_clone=1 or"
                " kernel.apparmor_restrict_unprivileged_userns=0)."
            )
        reasons = {name: self._why_not(name) for name in self.specs}
        for why in dict.fromkeys(filter(None, reasons.values())):
            names = [name for name in reasons if reasons[name] == why]
            sentences.append(f"Not on offer: {', '.join(names)}. {why}")
        return sentences

    def fits(self, cluster: Cluster) -> str:
        """Return why this computer can never run `cluster`; "" if it can run `cluster`."""
        for name in cluster.type_names:
            if name not in self.specs:
                return f"{name} is not a local instance type; known: {', '.join(self.specs)}."
            if why := self._why_not(name):
                return f"{name} is not on offer: {why}"
        if len(cluster.members) > 1 and not self.isolation.namespaces:
            return (
                "Several hosts need separate networks, which this machine cannot create;"
                " see `srift status`."
            )
        cores = cores_of(cluster)
        if cores > most_cores() + 1e-9:
            return f"{cluster.name} needs {cores:g} cores; this machine offers {most_cores():g}."
        return ""

    def refuse_if_taken(self, wanted: float) -> None:
        """Raise NoCapacity if the running hosts leave fewer than `wanted` cores free.

        Running hosts of all users and SRIFT_HOMEs count. If this computer cannot separate networks,
        any running host prevents a new host, and NoCapacity is raised.

        wanted: number of cores for new hosts. With 0, the function only checks that the running
            hosts do not use too many cores.
        """
        alive = hosts()
        taken = sum(mark.cores for mark in alive)
        if taken + wanted > most_cores() + 1e-9:
            held = ", ".join(sorted({mark.lease_id for mark in alive}))
            raise NoCapacity(
                f"{wanted or taken:g} cores are needed, but not enough of the "
                f"{most_cores():g} cores for hosts are free. Running launches: {held}. Wait until "
                "these launches end. `srift reap` ends launches whose Srift process has died"
            )
        if wanted and alive and not self.isolation.namespaces:
            raise NoCapacity(
                "another host is running, and hosts without separate networks run one at a time: "
                "wait until the other host ends"
            )

    def _why_not(self, name: str) -> str:
        """Return why this computer cannot offer the instance type `name`; "" if it can."""
        cores = self.specs[name].cores
        if self.shares.why_not and not cores.is_integer():
            return (
                f"Fractions of a core cannot be enforced here ({self.shares.why_not}). Run as root,"
                " or where cgroup's cpu controller is delegated to you"
                " (systemd-run --user --scope -p Delegate=yes)."
            )
        if cores > most_cores() + 1e-9:
            return (
                f"This machine offers {most_cores():g} of its {local_cpu.usable_cores():g} cores."
                " Use a machine with more cores."
            )
        return ""


def cores_of(cluster: Cluster) -> float:
    """Return the number of cores that all hosts of a cluster need together."""
    return sum(offer.instance_type.cores for offer in cluster.members)


def most_cores() -> float:
    """Return the number of cores that all hosts on this computer may use together."""
    return local_cpu.usable_cores() - SPARE_CORES
