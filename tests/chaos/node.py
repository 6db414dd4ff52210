"""One machine's courier and agent, scripted: what they upload, and when, without a process."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from tasks.node.device_check import DEVICES_WITHIN_S, missing_devices
from tasks.node.processes import EXIT_NO_DEVICE
from tasks.node.record import MACHINE, Plan, plan_from_json
from tests.chaos.gang import Gang, record_of
from tests.chaos.scenario import STAGES, Trouble
from tests.fake_ec2 import Instance
from tests.fake_s3 import ROLE

if TYPE_CHECKING:
    from tests.chaos.world import ChaosAws

MOST_FILES, FLOOD = 60, 80  # of one machine that the mirror takes here, and of a flood
NESTED = b"[" * 300 + b"]" * 300
FLUSH_S = 20.0  # that a courier asked to go down carries on, as sync.py has it
_FROM_OUTSIDE = ("Client.UserInitiatedShutdown", "Client.InstanceInitiatedShutdown")


class Node:
    """`instance` with its troubles. `step()` is a second; records are uploaded first."""

    def __init__(self, world: ChaosAws, instance: Instance, troubles: list[Trouble]) -> None:
        self.world, self.instance, self.troubles = world, instance, troubles
        self.ends_at = instance.ends_itself_at()
        self.kinds = {trouble.kind for trouble in troubles}
        self.lease_id = instance.tags["srift:lease"]
        self.skew_s = (
            world.rng.choice([0.0, 0.0, 5.0, -7200.0, 5 * 3600.0]) if "skew" in self.kinds else 0.0
        )
        self.start_s = world.rng.uniform(3.0, 15.0)
        self.item_s = world.rng.uniform(4.0, 11.0)
        self.rank: int | None = None
        self.gang: Gang | None = None
        self.attempt = 0
        self.looks: tuple[datetime, Plan, str] | None = (
            None  # until when for its devices, for which plan, and in vain
        )
        self.reached: dict[str, datetime] = {}
        self.hung = self.leaving = False
        self.waiting: dict[str, bytes] = {}
        self.came: set[Trouble] = set()
        self.sent: set[str] = set()
        self.goes_at: datetime | None = None
        self.first_record = ""
        self._manifest: dict[str, str] = {}
        self._beat = self._retry = instance.launched_at

    @property
    def alive(self) -> bool:
        """Whether the machine runs."""
        return self.instance.ended_at is None

    @property
    def device(self) -> str:
        """As torch names it: a GPU that its driver does not bring up leaves the processor."""
        return "cpu" if {"no devices", "wrong device"} & self.kinds else "Tesla T4"

    @property
    def works(self) -> bool:
        """Whether it takes part in a run."""
        return self.alive and not self.hung and not self.leaving

    def clock_unix(self) -> float:
        """What time it takes it to be."""
        return self.world.now.timestamp() + self.skew_s

    def step(self) -> None:
        """A second of its life."""
        now, one = self.world.now, self.instance
        if one.ended_at is not None:
            if (
                one.reason in _FROM_OUTSIDE
                and now < one.ended_at + timedelta(seconds=FLUSH_S)
                and not self.hung
            ):
                self._carry(now)
            return
        if now < one.launched_at + timedelta(seconds=min(one.boot_s, 1e6)):
            return
        self._reach("booted")
        self._suffer(now)
        if self.hung or "mute" in self.kinds or not self.alive:
            return
        if "booted.json" not in self.waiting and self.rank is None:
            self.say("booted.json", {"booted_unix": self.clock_unix()})
        self._listen(now)
        self._look(now)
        if self.rank is not None and self.works and now >= self._beat + timedelta(seconds=2.0):
            self._beat = now
            running = self.gang is not None
            self.say(
                "heartbeat.json",
                {"phase": "running" if running else "waiting", "run_id": "", "attempt": 1},
            )
        self._carry(now)
        if self.leaving and not self.waiting:
            one.end(now, "Client.InstanceInitiatedShutdown")

    def say(self, name: str, body: dict[str, Any]) -> None:
        """Into its folder, from where it is carried."""
        self.waiting[name] = json.dumps(body).encode()
        stage = name.partition("-")[0].removesuffix(".json")
        if stage in STAGES:
            self._reach(stage)

    def record(self, run_id: str, body: dict[str, Any]) -> None:
        """Write a record, garbage if that is its trouble. An uploaded record is final."""
        if run_id in self.sent:
            return
        content = json.dumps(body).encode()
        if "garbage" in self.kinds and not self.first_record:
            content = content[: len(content) // 2]
        if "nests" in self.kinds and not self.first_record:
            content = content.replace(b'"values": {', b'"values": {"nested": ' + NESTED + b", ")
        self.first_record = self.first_record or run_id
        self.waiting[f"records/{run_id}.json"] = content

    def crashes(self, run_id: str) -> bool:
        """Whether the workload fails here: the first run of such a machine, and only that."""
        fails = "crash" in self.kinds and not self.first_record
        self.first_record = self.first_record or (run_id if fails else "")
        return fails

    def progress(self, attempt: int, run_id: str, index: int) -> None:
        """At what it is."""
        self._reach("running")
        self.say("progress.json", {"attempt": attempt, "run_id": run_id, "index": index})

    def finish(self, attempt: int, code: int, worker_code: int, reason: str, culprit: str) -> None:
        """Its torchrun has ended."""
        body = {
            "attempt": attempt,
            "exit_code": code,
            "worker_exit_code": worker_code,
            "reason": reason,
        }
        self.say(
            f"finished-{attempt}.json",
            body | {"run_id": culprit, "log_tail": "", "finished_unix": 1.0},
        )
        self.gang = None

    def reads(self, name: str) -> bool:
        """Whether the controller's file has come here, whole and as the manifest names it."""
        content = self._object(f"in/{name}")
        digest = self._manifest.get(name)
        return content is not None and digest == hashlib.sha256(content).hexdigest()

    def _reach(self, stage: str) -> None:
        self.reached.setdefault(stage, self.world.now)

    def _object(self, name: str) -> bytes | None:
        found = self.world.s3.objects.get(
            f"srift/leases/{self.lease_id}/{ROLE}:{self.instance.instance_id}/{name}"
        )
        return None if found is None else found[0]

    def _listen(self, now: datetime) -> None:
        manifest = self._object("in/manifest.json")
        if manifest is None:
            return
        self._manifest = json.loads(manifest)["files"]
        if self.rank is None:
            if now < self.reached["booted"] + timedelta(seconds=self.start_s) or not self.reads(
                "node.json"
            ):
                return
            self.rank = int(json.loads(self._object("in/node.json") or b"")["node"])
            self.say(
                "ready.json",
                {"address": self.instance.address, "fingerprint": "f1", "torch_version": "2.13.0"},
            )
        if self.reads("done.json") and not self.leaving:
            self._reach("done")
            self.leaving = True
            self._drop(now)
        elif self.reads("plan.json"):
            self._plan((self._object("in/plan.json") or b"").decode(), now)

    def _plan(self, text: str, now: datetime) -> None:
        attempt = int(json.loads(text)["attempt"])
        if attempt <= self.attempt:
            return
        plan = plan_from_json(text)
        if self.gang is not None:
            self.finish(self.attempt, -9, 1, "replaced by a newer attempt", "")
            self._drop(now)
        self.attempt = attempt
        if not plan.items or self.rank not in (plan.ranks or range(len(plan.addresses))):
            return
        assert self.rank is not None
        expected = plan.expected[self.rank]
        lacks = (
            missing_devices(expected, [self.device] * expected.count)
            if "wrong device" not in self.kinds
            else ""
        )
        self.looks = (now + timedelta(seconds=DEVICES_WITHIN_S), plan, lacks) if lacks else None
        if lacks:
            return
        gangs = self.world.gangs
        self.gang = gangs.setdefault((self.lease_id, attempt), Gang(plan, self.item_s))
        self.gang.join(self.rank, self, now)

    def _look(self, now: datetime) -> None:
        """Its runs fail once it has waited for its devices in vain, as prepare.py has it."""
        if self.looks is None or now < self.looks[0] or not self.works:
            return
        _, plan, reason = self.looks
        self.looks = None
        for item in plan.items:
            if self.rank in item.nodes:
                body = record_of(plan, item, self.clock_unix()) | {
                    "status": "failed",
                    "reason": reason,
                    "values": {},
                }
                body["cause"] = MACHINE
                self.record(item.run_id, body)
        self.finish(plan.attempt, EXIT_NO_DEVICE, EXIT_NO_DEVICE, reason, "")

    def _drop(self, now: datetime) -> None:
        if self.gang is not None:
            self.gang.leave(self, now)
        self.gang = None

    def _suffer(self, now: datetime) -> None:
        """What is due of its troubles."""
        for trouble in self.troubles:
            since = self.reached.get(trouble.stage)
            if (
                since is None
                or now < since + timedelta(seconds=trouble.after_s)
                or trouble in self.came
            ):
                continue
            self.came.add(trouble)
            trouble_of = getattr(self, f"_{trouble.kind.replace(' ', '_')}", None)
            if trouble_of is not None:
                self.world.note(
                    f"{self.instance.instance_id[-3:]} (node {self.rank}): {trouble.kind}"
                )
                trouble_of(now)
        if self.goes_at is not None and now >= self.goes_at:
            self.world.interrupt(self.instance.instance_id)

    def _notice(self, now: datetime, kind: str = "interruption") -> None:
        at = now + timedelta(seconds=120)
        body = {
            "kind": kind,
            "action": "terminate",
            "at": f"{at:%Y-%m-%dT%H:%M:%SZ}" if kind == "interruption" else "",
        }
        self.waiting["notice.json"] = json.dumps(body | {"seen_unix": self.clock_unix()}).encode()
        if kind == "interruption":
            self.goes_at = at

    def _rebalance(self, now: datetime) -> None:
        self._notice(now, "rebalance")

    def _taken(self, now: datetime) -> None:
        self.world.interrupt(self.instance.instance_id)

    def _retired(self, now: datetime) -> None:
        self.instance.end(now, "Server.InternalError")

    def _hangs(self, now: datetime) -> None:
        self.hung = True

    def _nests(self, now: datetime) -> None:
        self._beat = now  # the next one that is sound comes later
        for name in ("heartbeat", "notice", "progress"):
            self.waiting[f"{name}.json"] = b'{"kind": "interruption", "at": ' + b"[" * 100_000

    def _floods(self, now: datetime) -> None:
        """Its own folder, and by a detour that IAM's stars allow those of the others."""
        userid = f"{ROLE}:{self.instance.instance_id}"
        mine = [node for node in self.world.nodes.values() if node.lease_id == self.lease_id]
        for number in range(FLOOD):
            self.world.s3.upload(
                now, self.lease_id, self.instance.instance_id, f"o-{number:04}.json", {}
            )
            for other in mine:
                detour = f"{userid}/out/{number:04}.json"
                self.world.s3.upload(now, self.lease_id, other.instance.instance_id, detour, {})

    def _carry(self, now: datetime) -> None:
        """Records first; a store that refuses is asked again, longer and longer."""
        if now < self._retry:
            return
        for name in sorted(self.waiting, key=lambda one: (not one.startswith("records/"), one)):
            if self._refused():
                self._retry = now + timedelta(seconds=self.world.rng.choice([1.0, 2.0, 8.0]))
                return
            content = self.waiting.pop(name)
            self.world.s3.upload(now, self.lease_id, self.instance.instance_id, name, content)
            if name.startswith("records/"):
                self.sent.add(name.removeprefix("records/").removesuffix(".json"))
                if "twice" in self.kinds:
                    self._again(name, content)

    def _refused(self) -> bool:
        """An upload that is torn on its way is none: S3 keeps whole objects only."""
        return "uploads fail" in self.kinds and self.world.rng.random() < 0.6

    def _again(self, name: str, content: bytes) -> None:
        """The same record a second time, under its own name and another machine's."""
        self.waiting[name] = content
        self.kinds.discard("twice")
        for other in self.world.nodes.values():
            if (
                other.lease_id == self.lease_id
                and other.alive
                and other.rank not in (None, self.rank)
            ):
                other.waiting[name] = content
