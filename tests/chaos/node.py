"""Simulate which files the agent and the courier of a machine upload, and when.

The agent runs the items. The courier copies files to and from S3. No process is started.
"""

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


@dataclass
class Trouble:
    """What goes wrong on a machine.

    `machine` is its number, from 0 in the order of launch. The trouble starts `after_s` seconds
    after the machine has reached `stage`.
    """

    machine: int
    kind: str
    stage: str = "booted"
    after_s: float = 0.0


class Node:
    """A simulated machine with its troubles. Each call of `step` simulates a second."""

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
        """Return True if the machine can take part in a run."""
        return self.alive and not self.hung and not self.leaving

    def clock_unix(self):
        """Return the Unix time by the machine's clock, which may be wrong."""
        return self.world.now.timestamp() + self.skew_s

    def step(self):
        """Simulate a second of the machine."""
        world, instance = self.world, self.instance
        now_s = world.elapsed_s
        if self.ends_at is not None and self.ends_at <= world.now:
            instance.end(self.ends_at, "Client.InstanceInitiatedShutdown")
        if instance.ended_at is not None:
            flushes = world.now < instance.ended_at + timedelta(seconds=FLUSH_S)
            if flushes and instance.reason in _FROM_OUTSIDE and not self.hung:
                self._carry(now_s)
            return
        if (world.now - instance.launched_at).total_seconds() < instance.boot_s:
            return
        # A machine may live to its deadline, a minute's rounding, and the caps' allowance.
        if world.now.timestamp() > float(instance.tags["srift:deadline"]) + 60.0 + 240.0:
            world.overdue.add(instance.instance_id)
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
            instance.end(world.now, "Client.InstanceInitiatedShutdown")

    def say(self, name, body):
        """Queue a file for upload. Its name may show that the machine has reached a stage."""
        self.waiting[name] = json.dumps(body).encode()
        stage = name.partition("-")[0].removesuffix(".json")
        if stage in STAGES:
            self._reach(stage)

    def record(self, run_id, body):
        """Queue a run's record for upload, unless it was uploaded before.

        If the machine has the trouble "garbage", its first record is cut in half.
        """
        if run_id in self.sent:
            return
        content = json.dumps(body).encode()
        if "garbage" in self.kinds and not self.first_record:
            content = content[: len(content) // 2]
        self.first_record = self.first_record or run_id
        self.waiting[f"records/{run_id}.json"] = content

    def crashes(self, run_id):
        """Return True if the workload fails in this run.

        It fails in the first run of a machine with the trouble "crash".
        """
        fails = "crash" in self.kinds and not self.first_record
        self.first_record = self.first_record or (run_id if fails else "")
        return fails

    def progress(self, attempt, run_id, index):
        self._reach("running")
        self.say("progress.json", {"attempt": attempt, "run_id": run_id, "index": index})

    def finish(self, attempt, code, worker_code, reason, run=""):
        """Report that the machine's torchrun has ended."""
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
        """Return True if the controller's file is in S3 with the digest in the manifest."""
        content = self._object(name)
        return bool(content) and self._manifest.get(name) == hashlib.sha256(content).hexdigest()

    def _reach(self, stage):
        self.reached.setdefault(stage, self.world.elapsed_s)

    def _object(self, name):
        key = f"srift/leases/{self.lease_id}/{ROLE}:{self.instance.instance_id}/in/{name}"
        content, _ = self.world.s3.objects.get(key, (b"", None))
        return content

    def _listen(self, now_s):
        """Read the controller's files: the rank, then plans, and at last the order to leave."""
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
        """Join the torchrun of a new attempt, if the plan includes this machine."""
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
        """Start the troubles that are due."""
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
        """Upload the queued files, records first. After a failure, wait a few seconds."""
        if now_s < self._retry_s:
            return
        for name in sorted(self.waiting, key=lambda path: (not path.startswith("records/"), path)):
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
        """Queue a record a second time, here and on the other machines of the lease."""
        self.kinds.discard("twice")
        self.waiting[name] = content
        for other in self.world.nodes.values():
            if other.lease_id == self.lease_id and other.alive and other.rank is not None:
                other.waiting[name] = content
