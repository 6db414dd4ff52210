"""One machine's courier and agent, scripted: what they upload, and when, without a process."""

import hashlib
import json
from dataclasses import dataclass
from datetime import timedelta

from tasks.node.record import plan_from_json
from tests.chaos.gang import Gang
from tests.fake_s3 import ROLE

STAGES = ("booted", "ready", "armed", "running", "finished", "done")
FLUSH_S = 20.0  # that a courier carries on when its machine goes down, as sync.py has it
BEAT_S, NOTICE_S = 2.0, 120
_FROM_OUTSIDE = ("Client.UserInitiatedShutdown", "Client.InstanceInitiatedShutdown")


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """What befalls the n-th machine ever launched, seconds after it has reached a stage."""

    machine: int
    kind: str
    stage: str = "booted"
    after_s: float = 0.0


class Node:
    """`instance` with its troubles. `step()` is a second; records are uploaded first."""

    def __init__(self, world, instance, troubles):
        self.world, self.instance, self.troubles = world, instance, troubles
        self.kinds = {trouble.kind for trouble in troubles}
        self.lease_id = instance.tags["srift:lease"]
        skews = [0.0, 0.0, 5.0, -7200.0, 5 * 3600.0] if "skew" in self.kinds else [0.0]
        self.skew_s = world.rng.choice(skews)
        self.start_s, self.item_s = world.rng.uniform(3.0, 15.0), world.rng.uniform(4.0, 11.0)
        self.ends_at = instance.ends_itself_at()
        self.rank = None
        self.gang = None
        self.attempt = 0
        self.reached = {}
        self.hung = self.leaving = False
        self.waiting = {}
        self.sent = set()
        self.first_record = ""
        self._goes_s = float("inf")
        self._beat_s = self._retry_s = 0.0
        self._manifest = {}
        self._plan = b""

    @property
    def alive(self):
        return self.instance.ended_at is None

    @property
    def works(self):
        """Whether it takes part in a run."""
        return self.alive and not self.hung and not self.leaving

    def clock_unix(self):
        """The time by its own clock."""
        return self.world.now.timestamp() + self.skew_s

    def step(self):
        """A second of its life."""
        world, one = self.world, self.instance
        now_s = world.elapsed_s
        if self.ends_at is not None and self.ends_at <= world.now:
            one.end(self.ends_at, "Client.InstanceInitiatedShutdown")
        if one.ended_at is not None:
            flushes = world.now < one.ended_at + timedelta(seconds=FLUSH_S)
            if flushes and one.reason in _FROM_OUTSIDE and not self.hung:
                self._carry(now_s)
            return
        if (world.now - one.launched_at).total_seconds() < one.boot_s:
            return
        # A machine may live to its deadline, a minute's rounding, and the caps' allowance.
        if world.now.timestamp() > float(one.tags["srift:deadline"]) + 60.0 + 240.0:
            world.overdue.add(one.instance_id)
        self._reach("booted")
        self._suffer(now_s)
        if self.hung or "mute" in self.kinds or not self.alive:
            return
        self._listen(now_s)
        if self.rank is not None and self.works and now_s >= self._beat_s + BEAT_S:
            self._beat_s = now_s
            phase = "waiting" if self.gang is None else "running"
            self.say("heartbeat.json", {"phase": phase, "run_id": "", "attempt": 1})
        self._carry(now_s)
        if self.leaving and not self.waiting:
            one.end(world.now, "Client.InstanceInitiatedShutdown")

    def say(self, name, body):
        """Write a file into its folder, from where it is carried."""
        self.waiting[name] = json.dumps(body).encode()
        stage = name.partition("-")[0].removesuffix(".json")
        if stage in STAGES:
            self._reach(stage)

    def record(self, run_id, body):
        """Write a record, the first as garbage if that is its trouble. An upload is final."""
        if run_id in self.sent:
            return
        content = json.dumps(body).encode()
        if "garbage" in self.kinds and not self.first_record:
            content = content[: len(content) // 2]
        self.first_record = self.first_record or run_id
        self.waiting[f"records/{run_id}.json"] = content

    def crashes(self, run_id):
        """Whether the workload fails here: the first run of such a machine, and only that."""
        fails = "crash" in self.kinds and not self.first_record
        self.first_record = self.first_record or (run_id if fails else "")
        return fails

    def progress(self, attempt, run_id, index):
        self._reach("running")
        self.say("progress.json", {"attempt": attempt, "run_id": run_id, "index": index})

    def finish(self, attempt, code, worker_code, reason, run=""):
        """Its torchrun has ended."""
        body = {
            "attempt": attempt,
            "exit_code": code,
            "worker_exit_code": worker_code,
            "reason": reason,
            "run_id": run,
            "log_tail": "",
            "finished_unix": 1.0,
        }
        self.say(f"finished-{attempt}.json", body)
        self.gang = None

    def reads(self, name):
        """Whether the controller's file has come here, whole and as the manifest names it."""
        content = self._object(name)
        return bool(content) and self._manifest.get(name) == hashlib.sha256(content).hexdigest()

    def _reach(self, stage):
        self.reached.setdefault(stage, self.world.elapsed_s)

    def _object(self, name):
        key = f"srift/leases/{self.lease_id}/{ROLE}:{self.instance.instance_id}/in/{name}"
        content, _ = self.world.s3.objects.get(key, (b"", None))
        return content

    def _listen(self, now_s):
        """Follow the controller's files: a rank, then a plan, at last the end."""
        self._manifest = json.loads(self._object("manifest.json") or b'{"files": {}}')["files"]
        if self.rank is None:
            if now_s < self.reached["booted"] + self.start_s or not self.reads("node.json"):
                return
            self.rank = int(json.loads(self._object("node.json"))["node"])
            facts = {"fingerprint": "f1", "torch_version": "2.13.0"}
            self.say("ready.json", {"address": self.instance.address} | facts)
        if self.reads("done.json") and not self.leaving:
            self._reach("done")
            self.leaving, self.gang = True, None
        elif self._object("plan.json") != self._plan and self.reads("plan.json"):
            self._plan = self._object("plan.json")
            self._follow(plan_from_json(self._plan.decode()), now_s)

    def _follow(self, plan, now_s):
        """Take part in a new attempt."""
        if plan.attempt <= self.attempt:
            return
        if self.gang is not None:
            self.finish(self.attempt, -9, 1, "replaced by a newer attempt")
        self.attempt = plan.attempt
        if not plan.items or self.rank not in (plan.ranks or range(len(plan.addresses))):
            return
        key = (self.lease_id, plan.attempt)
        self.gang = self.world.gangs.setdefault(key, Gang(plan, self.item_s))
        self.gang.join(self.rank, self, now_s)

    def _suffer(self, now_s):
        """Let the troubles that are due happen."""
        for trouble in list(self.troubles):
            since_s = self.reached.get(trouble.stage)
            if since_s is None or now_s < since_s + trouble.after_s:
                continue
            self.troubles.remove(trouble)
            self.world.note(f"{self.instance.instance_id[-3:]} (node {self.rank}): {trouble.kind}")
            match trouble.kind:
                case "notice":
                    self._goes_s = now_s + NOTICE_S
                    at = self.world.now + timedelta(seconds=NOTICE_S)
                    self._warn("interruption", f"{at:%Y-%m-%dT%H:%M:%SZ}")
                case "rebalance":
                    self._warn("rebalance", "")
                case "taken":
                    self._goes_s = now_s
                case "retired":
                    self.instance.end(self.world.now, "Server.InternalError")
                case "hangs":
                    self.hung = True
        if now_s >= self._goes_s:
            self.world.interrupt(self.instance.instance_id)

    def _warn(self, kind, at):
        body = {"kind": kind, "at": at}
        self.waiting["notice.json"] = json.dumps(body).encode()

    def _carry(self, now_s):
        """Records first; a store that refuses is asked again, longer and longer."""
        if now_s < self._retry_s:
            return
        for name in sorted(self.waiting, key=lambda one: (not one.startswith("records/"), one)):
            # An upload that is torn on its way is none: S3 keeps whole objects only.
            if "uploads fail" in self.kinds and self.world.rng.random() < 0.6:
                self._retry_s = now_s + self.world.rng.choice([1.0, 2.0, 8.0])
                return
            content = self.waiting.pop(name)
            to = (self.lease_id, self.instance.instance_id)
            self.world.s3.upload(self.world.now, *to, name, content)
            if name.startswith("records/"):
                self.sent.add(name.removeprefix("records/").removesuffix(".json"))
                if "twice" in self.kinds:
                    self._repeat(name, content)

    def _repeat(self, name, content):
        """The same record a second time, under its own name and another machine's."""
        self.kinds.discard("twice")
        self.waiting[name] = content
        for other in self.world.nodes.values():
            if other.lease_id == self.lease_id and other.alive and other.rank is not None:
                other.waiting[name] = content
