"""One acquired cluster of EC2: state of each machine, dollars so far, and replacements."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from models.domain.cluster import Cluster
from tasks.providers.base import NodeState, ProviderError, RunningCluster, json_of_node
from tasks.providers.ec2.api import ALIVE, Answer, Ec2Api
from tasks.providers.ec2.attempts import Attempt
from tasks.providers.ec2.launch import Launcher
from tasks.providers.ec2.leases import Ec2Lease, Ec2Machine
from tasks.providers.ec2.mailbox_s3 import Mirror, Place

LOOK_EVERY_S = 5.0
READY_WITHIN_S = 600.0
NOTICE_S = 120.0  # from an interruption notice to the machine's end, as AWS says
_INTERRUPTED = ("Server.SpotInstanceTermination", "Server.SpotInstanceShutdown")
_REASONS = {
    "Server.SpotInstanceTermination": "taken back by the spot market",
    "Server.SpotInstanceShutdown": "taken back by the spot market",
    "Client.InstanceInitiatedShutdown": "shut down by itself: its deadline, or no agent",
    "Client.UserInitiatedShutdown": "terminated by the reaper or a person",
    "Server.ScheduledStop": "AWS retired its hardware",
    "Server.InternalError": "its hardware failed",
}


class Ec2Cluster(RunningCluster):
    """Several threads may use it."""

    ready_within_s = READY_WITHIN_S
    checkpoints: Path | None = None

    def __init__(
        self, api: Ec2Api, launcher: Launcher, attempt: Attempt, cluster: Cluster, mirror: Mirror
    ) -> None:
        self._api, self._launcher, self._attempt = api, launcher, attempt
        self.lease_id, self.mailbox, self.mirror = launcher.lease.lease_id, mirror.mailbox, mirror
        self.cluster = cluster
        self.image_id = launcher.spec.image_id
        self._lock = threading.RLock()
        self._seen: dict[str, Answer] = {}
        self._looked_at: datetime | None = None

    @property
    def addresses(self) -> list[str]:  # type: ignore[override]
        return [machine.address for machine in self._launcher.lease.current]

    def nodes(self) -> Sequence[NodeState]:
        """State of each machine, in rank order; a few seconds old, older if AWS is silent."""
        with self._lock:
            now, latest = self._api.clock.now(), self._looked_at
            if latest is None or (now - latest).total_seconds() >= LOOK_EVERY_S:
                self._look()
            return [self._state(machine) for machine in self._launcher.lease.current]

    def now_unix(self) -> float:
        """The store's clock at the last complete round of the mirror."""
        return self.mirror.now_unix

    def usd_so_far(self) -> float | None:
        """Dollars of every machine of the lease, also of refused attempts."""
        with self._lock:
            return self._launcher.lease.usd_until(self._api.clock.now())

    def replace(self, node: int) -> bool:
        """A machine of the same type, market and zone; records and logs of the lost one stay."""
        with self._lock:
            self.mirror.sync()
            try:
                if not self._launcher.another(self._attempt, node):
                    return False
            except ProviderError:
                return False
            self._looked_at = None
            self.mirror.place(places_of(self._launcher.lease))
            for file in (self.mailbox / f"node-{node}").glob("*.json"):
                file.unlink(missing_ok=True)
            self.mirror.sync()
            return True

    def all_down(self) -> bool:
        """Whether no machine runs any more; False if AWS does not answer."""
        with self._lock:
            if not self._look():
                return False
            return not any(
                _alive(self._seen.get(machine.instance_id))
                for machine in self._launcher.lease.current
            )

    def _look(self) -> bool:
        """Ask EC2 about the machines; False if AWS does not answer."""
        lease, now = self._launcher.lease, self._api.clock.now()
        ids = [machine.instance_id for machine in lease.current]
        self._looked_at = now
        try:
            found = self._api.instances(lease.region, ids=ids)
        except ProviderError:
            return False
        # A machine that EC2 has shown and shows no more is gone; one never shown may be new.
        self._seen = {name: {} for name in self._seen}
        self._seen |= {str(described["InstanceId"]): described for described in found}
        gone = [
            replace(machine, ended_at=now)  # a machine ends, for the bill, when its end was seen
            for machine in lease.current
            if not machine.ended_at and not _alive(self._seen.get(machine.instance_id))
        ]
        if gone:
            with suppress(OSError):  # a full disk: the machine is counted a little longer
                self._launcher.keep(lease.with_machines(*gone))
        return True

    def _state(self, machine: Ec2Machine) -> NodeState:
        described, notice = self._seen.get(machine.instance_id), self._notice(machine)
        if _alive(described):
            return NodeState(
                alive=True, leaving_s=self._leaving_s(notice), notice=str(notice.get("kind", ""))
            )
        code = str((described or {}).get("StateReason", {}).get("Code", ""))
        interrupted = code in _INTERRUPTED or notice.get("kind") == "interruption"
        why = _REASONS[_INTERRUPTED[0]] if interrupted else _REASONS.get(code, f"gone ({code})")
        place = f"{machine.instance_type}, {machine.market} in {machine.zone}"
        reason = f"{machine.instance_id} ({place}): {why}"
        return NodeState(alive=False, interrupted=interrupted, reason=reason)

    def _notice(self, machine: Ec2Machine) -> dict[str, Any]:
        """What the machine read in its metadata; empty if nothing. A node may write anything."""
        file = self.mailbox / f"node-{machine.rank}" / "notice.json"
        try:
            body = json_of_node(file.read_text())
            moment = file.stat().st_mtime
        except (OSError, ValueError):
            return {}
        known = isinstance(body, dict) and body.get("kind") in ("interruption", "rebalance")
        return body | {"heard_unix": moment} if known else {}

    def _leaving_s(self, notice: dict[str, Any]) -> float | None:
        """Seconds until an interruption, by the store's clock; None without notice."""
        if notice.get("kind") != "interruption":
            return None
        at = _unix(str(notice.get("at", "")))
        most = float(notice["heard_unix"]) + NOTICE_S
        return max(0.0, min(most if at is None else at, most) - self.now_unix())


def places_of(lease: Ec2Lease) -> dict[str, Place]:
    """Every machine of the lease that had a rank, by its aws:userid."""
    return {
        userid: Place(rank=machine.rank, current=machine.current)
        for userid, machine in lease.userids.items()
        if machine.rank >= 0
    }


def _alive(described: Answer | None) -> bool:
    """A machine that EC2 has not shown yet is new."""
    return described is None or described.get("State", {}).get("Name") in ALIVE


def _unix(text: str) -> float | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
