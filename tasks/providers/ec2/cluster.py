"""Report the state and dollars of one acquired EC2 cluster, and replace its lost machines."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..base import NodeState, ProviderError, RunningCluster, json_of_node
from .api import ALIVE, Answer
from .attempts import Attempt
from .launch import Launcher
from .leases import Ec2Machine
from .mailbox_s3 import Mirror

LOOK_EVERY_S = 5.0
READY_WITHIN_S = 600.0
NOTICE_S = 120.0  # from an interruption notice to the machine's end, according to AWS
_INTERRUPTED = ("Server.SpotInstanceTermination", "Server.SpotInstanceShutdown")


class Ec2Cluster(Launcher, RunningCluster):
    """A launched EC2 cluster. Several threads may call its methods."""

    ready_within_s = READY_WITHIN_S
    checkpoints: Path | None = None

    def start(self, attempts: Sequence[Attempt], mirror: Mirror) -> None:
        """Try `attempts` until AWS grants one, and send its machines their mailbox files.

        Raises NoCapacity if AWS refuses every attempt, and ProviderError for all other failures.
        """
        self.lease_id, self.image_id = self.lease.lease_id, str(self.spec.image["ImageId"])
        self.mirror, self.mailbox, self._lock = mirror, mirror.mailbox, threading.RLock()
        self._seen: dict[str, Answer] = {}
        self._looked_at = datetime.min.replace(tzinfo=UTC)
        try:
            self._attempt, self.cluster = self.launch(attempts)
            usd_per_hour, market = self.cluster.usd_per_hour, self._attempt.market
            self.keep(replace(self.lease, market=market, usd_per_hour=usd_per_hour))
        except OSError as error:
            raise ProviderError(
                f"the lease could not be written. Free disk space and run `srift reap`: {error}"
            ) from error
        mirror.serve(self.lease)
        mirror.sync()

    @property
    def addresses(self) -> list[str]:  # type: ignore[override]
        """Return the machines' private IP addresses, in rank order."""
        return [machine.address for machine in self.lease.current]

    def nodes(self) -> Sequence[NodeState]:
        """Return the state of each machine, in rank order.

        The states are up to LOOK_EVERY_S seconds old, and older while AWS does not answer.
        """
        with self._lock:
            if (self._api.now() - self._looked_at).total_seconds() >= LOOK_EVERY_S:
                self._look()
            return [self._state(machine) for machine in self.lease.current]

    def now_unix(self) -> float:
        """Return S3's Unix time at the last complete round of the mirror."""
        return self.mirror.now_unix

    def usd_so_far(self) -> float | None:
        """Return the dollars of all machines of the lease, including those of refused attempts."""
        with self._lock:
            return self.lease.usd_until(self._api.now())

    def replace(self, node: int) -> bool:
        """Replace the machine of rank `node`; return False if AWS cannot do that.

        The new machine has the same type, market and zone. The mailbox keeps records and logs of
        the lost machine, and loses its state files.
        """
        with self._lock:
            self.mirror.sync()
            try:
                if not self.another(self._attempt, node):
                    return False
            except ProviderError:
                return False
            self._look()
            self.mirror.serve(self.lease)
            for file in (self.mailbox / f"node-{node}").glob("*.json"):
                file.unlink(missing_ok=True)
            self.mirror.sync()
            return True

    def all_down(self) -> bool:
        """Return True if no machine runs any more. Return False if AWS does not answer."""
        with self._lock:
            current = self.lease.current
            return self._look() and not any(self._alive(machine) for machine in current)

    def _look(self) -> bool:
        """Ask EC2 for the state of the machines; return False if AWS does not answer."""
        lease, now = self.lease, self._api.now()
        self._looked_at = now
        try:
            found = self._api.instances(
                lease.region, ids=[machine.instance_id for machine in lease.current]
            )
        except ProviderError:
            return False
        # A machine that EC2 no longer shows is gone. A machine that it has never shown may be new.
        self._seen = {name: {} for name in self._seen} | found
        gone = [
            replace(machine, ended_at=now)  # dollars count until the end is noticed
            for machine in lease.current
            if not machine.ended_at and not self._alive(machine)
        ]
        if gone:
            with suppress(OSError):  # with a full disk, dollars count a little longer
                self.keep(lease.with_machines(*gone))
        return True

    def _alive(self, machine: Ec2Machine) -> bool:
        """Return True if EC2 lists the machine as alive or has never listed it."""
        described = self._seen.get(machine.instance_id)
        return described is None or described.get("State", {}).get("Name") in ALIVE

    def _state(self, machine: Ec2Machine) -> NodeState:
        """Return the machine's state from EC2's latest answer and the machine's notice."""
        notice = self._notice(machine)
        kind = str(notice.get("kind", ""))
        if self._alive(machine):
            return NodeState(alive=True, leaving_s=self._leaving_s(notice), notice=kind)
        code = str(self._seen[machine.instance_id].get("StateReason", {}).get("Code", "gone"))
        interrupted = code in _INTERRUPTED or kind == "interruption"
        place = f"{machine.instance_type}, {machine.market} in {machine.zone}"
        why = "taken back by the spot market, " if interrupted else ""
        reason = f"{machine.instance_id} ({place}): {why}{code}"
        return NodeState(alive=False, interrupted=interrupted, reason=reason)

    def _notice(self, machine: Ec2Machine) -> dict[str, Any]:
        """Return the spot notice that the machine read in its metadata; {} if there is no notice.

        Its key `heard_unix` is S3's Unix time when the notice was uploaded. A node may upload
        anything, so unknown content is ignored.
        """
        file = self.mailbox / f"node-{machine.rank}" / "notice.json"
        try:
            body = json_of_node(file.read_text())
            moment = file.stat().st_mtime
        except (OSError, ValueError):
            return {}
        known = isinstance(body, dict) and body.get("kind") in ("interruption", "rebalance")
        return body | {"heard_unix": moment} if known else {}

    def _leaving_s(self, notice: dict[str, Any]) -> float | None:
        """Return the seconds until the interruption that `notice` announces, on S3's clock.

        Return None if `notice` announces no interruption.
        """
        if notice.get("kind") != "interruption":
            return None
        ends = float(notice["heard_unix"]) + NOTICE_S
        with suppress(ValueError):
            moment = datetime.fromisoformat(str(notice.get("at")))
            ends = min(ends, moment.replace(tzinfo=moment.tzinfo or UTC).timestamp())
        return max(0.0, ends - self.now_unix())
