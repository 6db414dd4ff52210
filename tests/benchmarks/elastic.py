"""Elastic torchrun jobs on local hosts that lose machines: is a checkpoint lost, and is their time what is predicted?

`python -m tests.benchmarks.strategies --parts elastic` (root, a quiet machine) first has Srift measure the steps that
two workloads make on one to four hosts, then runs jobs of both, whose machines have exponential lives: some go on with
fewer, for some another host is started in the place of each that is lost. The first two jobs teach what a restart
takes; each job after them is predicted by what the warehouse knew before it, steps that jobs made included:

    told       its seconds given the moments at which it lost machines, which nobody could know
    blind      their mean over moments that are drawn: for sums over jobs alone
    prior      as told, by what is stated before any restart was measured
    own_steps  as told, with steps as fast as the job made them: what the spot model alone is off by

All are from asking for the machines to the record.
"""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from models.campaign.campaign import Launch
from models.campaign.candidates import Measurement
from models.domain.cluster import Cluster, parse_cluster
from models.domain.setup_table import rows_of
from models.job.checkpoints import checkpoint_bytes
from models.job.duration import best_interval
from models.job.job_conditions import Learned, pools_of
from models.job.restarts import NO_RESTARTS
from tasks.campaign.budget import Tally
from tasks.campaign.campaign import serve_launch
from tasks.execution.collect import collect_launch
from tasks.market.job_conditions import job_conditions
from tasks.market.offers import current_offers
from tasks.node.elastic import shares
from tasks.providers.base import RunningCluster
from tasks.providers.local.processes import hosts
from tasks.reporting.progress import reporter
from tasks.workspace.workspace import Workspace
from tests.benchmarks.elastic_job import ElasticJob
from tests.benchmarks.trial import Unseen, launch_of, measure_all
from warehouse.reads import mart

WORKLOADS = ("wide_mlp", "residual_cnn")
HOSTS = (2, 3, 4)
BATCH = 48  # of a step: the same for each number of machines, in equal micro-batches
SHRINKS, REPLACED = "shrinks", "replaced"
STEPS = (
    "steps"  # a type of its own, alike: elastic jobs build their model before they count as started
)
WORK_S = 40.0  # of a job's steps, with all its machines
LOSS_EVERY_S = 30.0  # the mean time between losses, as long as all machines are there
_TEACHING = {
    SHRINKS: (4, (6.0, 32.0, 60.0)),
    REPLACED: (3, (7.0, 36.0)),
}  # hosts, and when each loses another machine
_MOST_S, _MOST_WAIT_S = 400.0, 600.0  # of one job; for others' hosts before it

Setting = tuple[str, int, int, int]  # workload, machines, samples of a device, micro-steps


def settings() -> str:
    """srift.toml of both workloads and of types that differ by what the market has after a loss."""
    text = "".join(
        f"[local.instance_types.{name}]\ncores = 0.4\nmemory_gib = 3.0\nbandwidth_gbps = 0.5\nusd_per_hour = 0.05\n"
        f"spot_usd_per_hour = 0.02\nspot_replaced = {str(name == REPLACED).lower()}\n\n"
        for name in (SHRINKS, REPLACED, STEPS)
    )
    for name in WORKLOADS:
        text += (
            f'[workloads.{name}]\nentrypoint = "{name}.py:build"\nsamples = 100000\nglobal_batch = {BATCH}\n'
            'goals = [{ goal = "cheapest" }]\n\n'
        )
    return text


def split(planned: int, machines: int) -> tuple[int, int]:
    """(samples of a device, micro-steps) when so many machines are left of those that the batch was planned for."""
    share = shares(BATCH, (BATCH // planned,) * machines)
    return share.micro_batches(0)[-1], share.micro_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One job: `fixed` moments of its losses if it is to teach, else they are drawn from `seed`."""

    workload: str
    kind: str
    hosts: int
    seed: int
    fixed: tuple[float, ...] = ()


def jobs(rounds: int) -> list[Asked]:
    """Those that teach, then those that are judged."""
    teach = [
        Asked(
            workload=workload, kind=kind, hosts=_TEACHING[kind][0], seed=0, fixed=_TEACHING[kind][1]
        )
        for workload, kind in zip(WORKLOADS, (SHRINKS, REPLACED), strict=True)
    ]
    judged = [
        Asked(
            workload=workload,
            kind=kind,
            hosts=many,
            seed=1000 * one + 100 * many + 10 * (kind == REPLACED) + at,
        )
        for one in range(rounds)
        for many in HOSTS
        for kind in (SHRINKS, REPLACED)
        for at, workload in enumerate(WORKLOADS)
    ]
    return teach + judged


@dataclass
class Market:
    """Takes machines of the cluster that is acquired next: each has an exponential life from the first step on, and so
    has one in its place from then on; or another at each `fixed` moment.
    """

    per_s: float
    seed: int
    fixed: Sequence[float] = ()
    taken: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def acquired(self, acquire: Any, *asked: Any, **how: Any) -> Iterator[RunningCluster]:
        """As the provider's `acquire`."""
        with acquire(*asked, **how) as running:
            thread = threading.Thread(target=self._take, args=(running,), daemon=True)
            thread.start()
            try:
                yield running
            finally:
                self._over.set()
                thread.join()

    def _take(self, running: Any) -> None:
        source = random.Random(self.seed)
        nodes = range(1, len(running.addresses))
        while not any(running.mailbox.glob("go-*.json")):
            if self._over.wait(0.02):
                return
        began = time.monotonic()
        lives = dict(enumerate(self.fixed)) or {
            node: source.expovariate(self.per_s) for node in nodes
        }
        while lives and not self._over.wait(0.02):
            due, at = min(lives.items(), key=lambda one: one[1])
            if time.monotonic() - began < at:
                continue
            del lives[due]
            node = 1 + due % len(nodes) if self.fixed else due
            if not running.nodes()[node].alive:  # not yet replaced
                lives[due] = at + source.expovariate(self.per_s)
                continue
            running.revoke(node)
            self.taken += 1
            if not self.fixed and self.replaces(running, node):
                lives[node] = at + source.expovariate(self.per_s)

    @staticmethod
    def replaces(running: Any, node: int) -> bool:
        """Whether another machine comes in the place of one of that type."""
        return bool(running.cluster.members[node].instance_type.name == REPLACED)


def steps_of(here: Workspace) -> dict[Setting, float]:
    """Seconds of a step by workload, machines, samples of a device and micro-steps, measured first where unknown."""
    wanted = sorted({(n, *split(planned, n)) for planned in HOSTS for n in range(1, planned + 1)})
    cluster = _cluster(here, STEPS, max(HOSTS), market="on-demand")

    def known() -> dict[Setting, float]:
        runs = mart(here.warehouse, "runs", provider="local")
        found: dict[Setting, list[float]] = {}
        for row in rows_of(runs):
            batches = str(row["batch_per_device"]).split("+")
            key = (
                str(row["workload"]),
                len(parse_cluster(str(row["cluster"]))),
                int(batches[0]),
                int(row["accumulation_steps"]),
            )
            found.setdefault(key, []).append(float(row["step_s"]))
        return {key: median(seconds) for key, seconds in found.items()}

    _wait_until_free()
    before = known()
    items = [
        Unseen(workload=name, nodes=tuple(range(n)), batches=(batch,) * n, accumulation_steps=micro)
        for name in WORKLOADS
        for n, batch, micro in wanted
        if (name, n, batch, micro) not in before
    ]
    if items:
        measure_all(
            here,
            [launch_of(cluster, items, "steps of elastic jobs")],
            f"steps-{datetime.now(UTC):%H%M%S}",
        )
    return known()


def _wait_until_free() -> None:
    """Wait for hosts of others on this machine: they take cores, and time from those of a job."""
    until = time.monotonic() + _MOST_WAIT_S
    while hosts() and time.monotonic() < until:
        time.sleep(1.0)


def _cluster(here: Workspace, kind: str, count: int, *, market: str = "spot") -> Cluster:
    """The first on demand: those that are left meet there."""
    offers = {one.market: one for one in current_offers(here) if one.instance_type.name == kind}
    return Cluster(members=(offers["on-demand"], *(offers[market],) * (count - 1)))


def planned(
    here: Workspace, asked: Asked, steps: dict[Setting, float], known: Learned
) -> ElasticJob:
    """The job as `known` has it, its checkpoints as far apart as is best."""
    n = asked.hosts
    step_s = {m: steps[asked.workload, m, *split(n, m)] for m in range(1, n + 1)}
    facts = {
        row["workload"]: row for row in rows_of(mart(here.warehouse, "workloads", provider="local"))
    }
    size = checkpoint_bytes(
        facts[asked.workload]["gradient_bytes"], facts[asked.workload]["checkpoint_bytes"]
    )
    met = known.gangs(*pools_of([_cluster(here, asked.kind, n)]), size)
    write_s = float(met.checkpoint_s[0])
    every = max(
        2, round(float(best_interval(write_s / 3600, 3600 / LOSS_EVERY_S)) * 3600 / step_s[n])
    )
    read_s = (
        write_s if known.reads is None else float(known.reads.seconds(size, [asked.kind])[0][0])
    )
    outcome = "replaced" if asked.kind == REPLACED else "fewer"
    return ElasticJob(
        steps=every * math.ceil(WORK_S / step_s[n] / every),
        checkpoint_every=every,
        step_s=step_s,
        startup_s=float(met.startup_s[0]),
        checkpoint_s=write_s,
        restore_s=read_s,
        lost_s=float(known.restarts.expected_s(outcome, [asked.kind])[0]),
        replaced=asked.kind == REPLACED,
    )


def run(here: Workspace, asked: Asked, job: ElasticJob, lease_id: str) -> dict[str, Any]:
    """The job made real: its seconds, and what the record says. Raises RuntimeError where it was not measured."""
    _wait_until_free()
    n = asked.hosts
    item = Measurement(
        kind="elastic",
        workload=asked.workload,
        nodes=tuple(range(n)),
        batches=(BATCH // n,) * n,
        est_s=_MOST_S / 2,
        steps=job.steps,
        checkpoint_every=job.checkpoint_every,
        wait_s=60.0 if asked.kind == REPLACED else 2.0,
    )
    cluster = _cluster(here, asked.kind, n)
    launch = Launch(
        cluster=cluster,
        items=(item,),
        est_s=_MOST_S / 2,
        est_usd=0.0,
        reason="to judge elastic runs",
    )
    market = Market(per_s=1 / LOSS_EVERY_S / (n - 1), seed=asked.seed, fixed=asked.fixed)
    acquire = here.provider.acquire
    here.provider.acquire = partial(market.acquired, acquire)  # type: ignore[method-assign]
    try:
        tally = Tally(cap_usd=math.inf, stop_at=time.monotonic() + _MOST_S)
        served = serve_launch(here, launch, lease_id, tally)
    finally:
        here.provider.acquire = acquire  # type: ignore[method-assign]
    seconds = sum(value for name, value in served.seconds.items() if name != "release hosts")
    collect_launch(here, served, lease_id, datetime.now(UTC))
    found = here.warehouse.select(
        "select body from raw_elastic where lease_id = $lease", {"lease": lease_id}
    )
    body = json.loads(found["body"].iloc[0]) if len(found) else {"status": served.outcome}
    if body["status"] != "measured":
        raise RuntimeError(f"{asked} was not measured: {served.outcome} {body.get('reason', '')}")
    start_s = served.seconds["start hosts"] + served.seconds["launch torchrun"]
    return {"seconds": seconds, "running": seconds - start_s, "taken": market.taken, "body": body}


def wrong_resumptions(values: dict[str, Any], every: int) -> int:
    """Starts that did not go on from the newest checkpoint that was whole by then, of one `every` so many steps.

    Of a step that was made again the record has the last checkpoint alone, so that what was lost of one shows in how
    many steps are made again: as many as lie between two are those of a loss while one was written.
    """
    wrong = 0
    for start in values["starts"]:
        whole = [
            one["step"] for one in values["checkpoints"] if one["ended_unix"] <= start["began_unix"]
        ]
        wrong += start["lost_steps"] > every or start["step"] != max(whole, default=0)
    return wrong


def steps_made(body: dict[str, Any]) -> dict[Setting, list[float]]:
    """Seconds of a step in each piece between two checkpoints of a run, by what `steps_of` knows them by."""
    values, found = body["values"], dict[Setting, list[float]]()
    ends = [*(start["began_unix"] for start in values["starts"][1:]), math.inf]
    for start, end in zip(values["starts"], ends, strict=True):
        micro = start["micro_steps"]
        key = (body["setup"]["workload"], len(start["nodes"]), start["batches"][0] // micro, micro)
        own = [
            one for one in values["checkpoints"] if start["began_unix"] < one["ended_unix"] <= end
        ]
        found.setdefault(key, []).extend(one["steps_s"] / one["steps"] for one in own)
    return found


def elastic_jobs(here: Workspace, *, rounds: int, minutes: float = math.inf) -> pd.DataFrame:
    """A row a job, in their order; those that this home has are not run again, and none begins after `minutes`."""
    stored, until = here.home / "elastic-jobs.jsonl", time.monotonic() + 60 * minutes
    rows = [json.loads(line) for line in stored.read_text().splitlines()] if stored.exists() else []
    measured, made = steps_of(here), dict[Setting, list[float]]()
    bodies = here.warehouse.select(
        "select body from raw_elastic where status = 'measured' order by loaded_at"
    )["body"]
    for one in map(json.loads, bodies):
        for key, seconds in steps_made(one).items():
            made.setdefault(key, []).extend(seconds)
    for number, asked in list(enumerate(jobs(rounds)))[len(rows) :]:
        if time.monotonic() > until:
            break
        steps = measured | {key: median(seconds) for key, seconds in made.items() if seconds}
        known = job_conditions(here)
        assert isinstance(known, Learned)
        job = planned(here, asked, steps, known)
        prior = planned(here, asked, steps, replace(known, reads=None, restarts=NO_RESTARTS))
        done = run(here, asked, job, f"elastic-{datetime.now(UTC):%Y%m%dT%H%M%S}-{number:02d}")
        values = done["body"]["values"]
        own = {key: median(seconds) for key, seconds in steps_made(done["body"]).items() if seconds}
        for key, seconds in steps_made(done["body"]).items():
            made.setdefault(key, []).extend(seconds)
        began = values["starts"][0]["began_unix"]
        losses = [one["lost_unix"] - began for one in done["body"]["setup"].get("losses", ())]
        told = replace(prior, steps=job.steps, checkpoint_every=job.checkpoint_every).seconds(
            losses, happened=True
        )
        row: dict[str, Any] = {
            "workload": asked.workload,
            "kind": asked.kind,
            "hosts": asked.hosts,
            "judged": not asked.fixed,
        }
        row |= {"taken": done["taken"], "starts": len(values["starts"]), "steps": values["steps"]}
        row |= {
            "every": job.checkpoint_every,
            "lost_steps": sum(one["lost_steps"] for one in values["starts"]),
        }
        row |= {
            "seconds": done["seconds"],
            "told": job.seconds(losses, happened=True),
            "prior": told,
        }
        row["own_steps"] = replace(
            job, step_s=planned(here, asked, steps | own, known).step_s
        ).seconds(losses, happened=True)
        row |= {"running": done["running"], "told_start": job.startup_s, "lost_s": job.lost_s}
        per_hour = 3600 / LOSS_EVERY_S / (asked.hosts - 1)
        row["blind"] = math.nan if asked.fixed else job.expected_seconds(per_hour, seed=asked.seed)
        row["wrong"] = wrong_resumptions(values, job.checkpoint_every)
        row["wrong"] += values["checkpoints"][-1]["step"] != job.steps
        rows.append(row | {"loss": values["last_loss"], "error": row["told"] / row["seconds"] - 1})
        rows[-1]["losses"] = [round(one, 1) for one in losses]
        with stored.open("a") as file:
            print(json.dumps(rows[-1]), file=file)
        reporter().say(json.dumps(rows[-1]))
    return pd.DataFrame(rows)


def errors(table: pd.DataFrame) -> dict[str, float]:
    """Of the judged jobs: mean relative errors of `told` and `own_steps`, with and without the start-up, the standard
    error of the first, and that of `prior`; sums of `told` and `blind` over the measured one, less 1.
    """
    own = table[table["judged"]]
    off = (own["told"] / own["seconds"] - 1).abs()
    running = ((own["told"] - own["told_start"]) / own["running"] - 1).abs()
    spot = (own["own_steps"] / own["seconds"] - 1).abs()
    spot_running = ((own["own_steps"] - own["told_start"]) / own["running"] - 1).abs()
    return {
        "spot": float(spot.mean()),
        "spot_running": float(spot_running.mean()),
        "told": float(off.mean()),
        "running": float(running.mean()),
        "noise": float(off.std() / np.sqrt(len(own))),
        "prior": float((own["prior"] / own["seconds"] - 1).abs().mean()),
        "sum": float(own["told"].sum() / own["seconds"].sum() - 1),
        "blind": float(own["blind"].sum() / own["seconds"].sum() - 1),
    }
