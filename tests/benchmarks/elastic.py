"""Elastic torchrun jobs on local hosts that lose machines: checkpoints lost, seconds predicted.

Srift first measures the steps of two workloads on one to four hosts (root, a quiet machine). Then
jobs of both run, whose machines have exponential lives: some jobs go on with fewer machines, in
others a new host replaces each lost one. The first two jobs teach the seconds of a restart. Later
jobs are predicted from the warehouse as it was before them, given the moments of their losses.
"""

import json
import math
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import typer

from models.campaign.candidates import PlannedRun
from models.domain.cluster import Cluster, parse_cluster
from models.domain.optimizer_state import checkpoint_bytes
from models.job.checkpoints import best_interval
from models.job.job_conditions import pools_of
from tasks.campaign.campaign import serve_launch
from tasks.campaign.spending import Tally
from tasks.execution.collect import collect_launch
from tasks.market.job_conditions import experience_of
from tasks.market.offers import current_offers
from tasks.node.elastic import shares
from tasks.providers.base import RunningCluster
from tasks.providers.local.processes import hosts
from tasks.workspace.workspace import Workspace
from tests.benchmarks.claims import Claim, Write, report, show
from tests.benchmarks.hosts import (
    Unseen,
    launch_of,
    launch_with,
    measure_all,
    project,
    trial_name,
    type_text,
    workload_text,
)

WORKLOADS, HOSTS = ("wide_mlp", "residual_cnn"), (2, 3, 4)
BATCH = 48  # of a step, in equal micro-batches
SHRINKS, REPLACED = "shrinks", "replaced"
STEPS = "steps"  # a type like the others, for steps
WORK_S, LOSS_EVERY_S = 40.0, 30.0  # of steps with all machines; mean time between losses
TEACHING = {SHRINKS: (4, (6.0, 32.0, 60.0)), REPLACED: (3, (7.0, 36.0))}  # hosts, losses
_MOST_S, _MOST_WAIT_S = 400.0, 600.0  # of one job; for other hosts before it
_NOTICED_S = 5.0  # until a silent machine counts as lost
Setting = tuple[str, int, int, int]  # workload, machines, samples of a device, micro-steps


@dataclass(frozen=True, kw_only=True)
class ElasticJob:
    """A job of `steps` on machines of which the first is not lost.

    `step_s` is by machines at work, 1 to all. `lost_s` is from a loss to the next step, without
    `restore_s`. `replaced`: another machine takes the lost one's place.
    """

    steps: int
    checkpoint_every: int
    step_s: Mapping[int, float]
    startup_s: float
    checkpoint_s: float
    restore_s: float
    lost_s: float
    replaced: bool

    def seconds(self, losses_s: Sequence[float]) -> float:
        """From the request to the last checkpoint, given seconds of losses after the first step.

        A machine lost before an earlier loss is noticed costs no more. A later one costs `lost_s`
        twice: the others wait for it to join.
        """
        at, noticed, done, machines = 0.0, 0.0, 0, max(self.step_s)
        last = (self.steps - 1) // self.checkpoint_every * self.checkpoint_every
        for loss in sorted(losses_s):
            if machines == 1:
                break
            piece_s = self.checkpoint_every * self.step_s[machines] + self.checkpoint_s
            joining = noticed < loss <= at
            if loss > at:
                done = min(done + int((loss - at) // piece_s) * self.checkpoint_every, last)
            twice = 1 + (joining and not self.replaced)
            at = loss + self.lost_s * twice + (self.restore_s if done else 0.0)
            noticed = loss + _NOTICED_S
            machines -= not self.replaced
        left = self.steps - done
        written = math.ceil(left / self.checkpoint_every) * self.checkpoint_s
        return self.startup_s + at + left * self.step_s[machines] + written


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One job; `losses_s` if it teaches, else losses are drawn from `seed`."""

    workload: str
    kind: str
    hosts: int
    seed: int = 0
    losses_s: tuple[float, ...] = ()


def jobs(rounds: int) -> list[Trial]:
    """Jobs that teach, then twelve judged ones a round."""
    found = [
        Trial(workload=workload, kind=kind, hosts=count, losses_s=losses)
        for workload, (kind, (count, losses)) in zip(WORKLOADS, TEACHING.items(), strict=True)
    ]
    for turn in range(rounds):
        for count in HOSTS:
            for kind in (SHRINKS, REPLACED):
                for workload in WORKLOADS:
                    seed = 1000 * turn + len(found)
                    found.append(Trial(workload=workload, kind=kind, hosts=count, seed=seed))
    return found


@dataclass
class Market:
    """Revokes machines of the next acquired cluster: exponential lives, or at `losses_s`."""

    per_s: float
    seed: int
    losses_s: Sequence[float] = ()
    taken: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def acquired(self, acquire: Any, *request: Any, **how: Any) -> Iterator[RunningCluster]:
        """Stand in for the provider's `acquire`."""
        with acquire(*request, **how) as running:
            thread = threading.Thread(target=self._take, args=(running,), daemon=True)
            thread.start()
            try:
                yield running
            finally:
                self.over.set()
                thread.join()

    def _take(self, running: Any) -> None:
        source, nodes = random.Random(self.seed), range(1, len(running.addresses))
        replaced = running.cluster.members[-1].instance_type.name == REPLACED
        while not any(running.mailbox.glob("go-*.json")):
            if self.over.wait(0.02):
                return
        began = time.monotonic()
        lives = dict(enumerate(self.losses_s))
        lives = lives or {node: source.expovariate(self.per_s) for node in nodes}
        while lives and not self.over.wait(0.02):
            due = min(lives, key=lives.__getitem__)
            at = lives[due]
            if time.monotonic() - began < at:
                continue
            del lives[due]
            node = 1 + due % len(nodes) if self.losses_s else due
            alive = running.nodes()[node].alive
            if alive:
                running.revoke(node)
                self.taken += 1
            if not alive or (replaced and not self.losses_s):
                lives[due] = at + source.expovariate(self.per_s)


def split(planned: int, machines: int) -> tuple[int, int]:
    """Samples of a device and micro-steps with `machines` left of the planned ones."""
    micro_batches = shares(BATCH, (BATCH // planned,) * machines)[0]
    return micro_batches[-1], len(micro_batches)


def known_steps(here: Workspace) -> dict[Setting, list[float]]:
    """Measured seconds of steps by setting, of runs and of elastic jobs."""
    found: dict[Setting, list[float]] = {}
    for row in here.warehouse.select("runs", {"provider": "local"}).to_dict("records"):
        machines = len(parse_cluster(str(row["cluster"])))
        batch, micro = str(row["batch_per_device"]).split("+")[0], row["accumulation_steps"]
        setting = (str(row["workload"]), machines, int(batch), int(micro))
        found.setdefault(setting, []).append(float(row["step_s"]))
    return found


def measure_steps(here: Workspace) -> None:
    """Measure the steps of every setting that a job may have."""
    wanted = sorted({(n, *split(planned, n)) for planned in HOSTS for n in range(1, planned + 1)})
    known = known_steps(here)
    items = [
        Unseen(
            workload=name,
            nodes=tuple(range(count)),
            batches=(batch,) * count,
            accumulation_steps=micro,
        )
        for name in WORKLOADS
        for count, batch, micro in wanted
        if (name, count, batch, micro) not in known
    ]
    if items:
        cluster = _cluster(here, STEPS, max(HOSTS), market="on-demand")
        measure_all(here, [launch_of(cluster, items, "steps of elastic jobs")], trial_name("steps"))


def _cluster(here: Workspace, kind: str, count: int, *, market: str = "spot") -> Cluster:
    """The first machine is on demand: the others meet there."""
    offers = {
        offer.market: offer for offer in current_offers(here) if offer.instance_type.name == kind
    }
    return Cluster(members=(offers["on-demand"], *(offers[market],) * (count - 1)))


def planned(here: Workspace, trial: Trial, steps: Mapping[Setting, list[float]]) -> ElasticJob:
    """The job as the warehouse knows it, with the best checkpoint interval."""
    known, count = experience_of(here).conditions, trial.hosts
    step_s = {
        machines: median(steps[trial.workload, machines, *split(count, machines)])
        for machines in range(1, count + 1)
    }
    workloads = here.warehouse.select("workloads", {"provider": "local"}).to_dict("records")
    facts = next(row for row in workloads if row["workload"] == trial.workload)
    size = checkpoint_bytes(facts["gradient_bytes"], facts["checkpoint_bytes"])
    gang = known.gangs(*pools_of([_cluster(here, trial.kind, count)]), size)
    write_s = float(gang.checkpoint_s[0])
    interval_s = 3600 * float(best_interval(write_s / 3600, 3600 / LOSS_EVERY_S))
    every = max(2, round(interval_s / step_s[count]))
    read_s = write_s
    outcome = "replaced" if trial.kind == REPLACED else "fewer"
    return ElasticJob(
        steps=every * math.ceil(WORK_S / step_s[count] / every),
        checkpoint_every=every,
        step_s=step_s,
        startup_s=float(gang.startup_s[0]),
        checkpoint_s=write_s,
        restore_s=read_s,
        lost_s=float(known.restarts.expected_s(outcome, [trial.kind])[0]),
        replaced=trial.kind == REPLACED,
    )


def run(here: Workspace, trial: Trial, job: ElasticJob) -> dict[str, Any]:
    """Run the job: its seconds, revocations and record. Raises RuntimeError if it fails."""
    until = time.monotonic() + _MOST_WAIT_S
    while hosts() and time.monotonic() < until:  # other hosts take cores
        time.sleep(1.0)
    count = trial.hosts
    item = PlannedRun(
        kind="elastic",
        workload=trial.workload,
        nodes=tuple(range(count)),
        batches=(BATCH // count,) * count,
        est_s=_MOST_S / 2,
        steps=job.steps,
        checkpoint_every=job.checkpoint_every,
        wait_s=60.0 if job.replaced else 2.0,
    )
    launch = launch_with(_cluster(here, trial.kind, count), (item,), "to judge elastic jobs")
    per_s = 1 / LOSS_EVERY_S / (count - 1)
    market = Market(per_s=per_s, seed=trial.seed, losses_s=trial.losses_s)
    acquire, lease = here.provider.acquire, trial_name("elastic")
    here.provider.acquire = partial(market.acquired, acquire)  # type: ignore[method-assign]
    try:
        tally = Tally(cap_usd=math.inf, stop_at=time.monotonic() + _MOST_S)
        served = serve_launch(here, launch, lease, tally)
    finally:
        here.provider.acquire = acquire  # type: ignore[method-assign]
    collect_launch(here, served, datetime.now(UTC))
    found = here.warehouse.select(
        "select * from raw_runs where kind = 'elastic' and lease_id = $lease", {"lease": lease}
    )
    body = found.iloc[0].to_dict() if len(found) else {"status": served.outcome}
    if body["status"] != "measured":
        raise RuntimeError(f"{trial} was not measured: {served.outcome}")
    seconds = sum(value for name, value in served.seconds.items() if name != "release hosts")
    return {"seconds": seconds, "taken": market.taken, "body": body}


def wrong_resumptions(values: dict[str, Any], every: int) -> int:
    """Starts that did not resume from the newest checkpoint that was whole by then.

    The record has only the last checkpoint of a repeated step, so a start that repeats more than
    `every` steps counts as wrong too.
    """
    wrong = 0
    for start in values["starts"]:
        written = values["checkpoints"]
        whole = [
            checkpoint["step"]
            for checkpoint in written
            if checkpoint["ended_unix"] <= start["began_unix"]
        ]
        wrong += start["lost_steps"] > every or start["step"] != max(whole, default=0)
    return wrong


def steps_made(body: dict[str, Any]) -> dict[Setting, list[float]]:
    """Seconds of a step between two checkpoints of a job, by setting."""
    found = dict[Setting, list[float]]()
    starts = body["starts"]
    ends = [*(start["began_unix"] for start in starts[1:]), math.inf]
    for start, end in zip(starts, ends, strict=True):
        micro, machines = start["micro_steps"], len(start["nodes"])
        setting = (body["workload"], machines, start["batches"][0] // micro, micro)
        step, before_unix = start["step"], start["began_unix"]
        for checkpoint in body["checkpoints"]:
            if start["began_unix"] < checkpoint["ended_unix"] <= end:
                spent_s = checkpoint["ended_unix"] - checkpoint["seconds"] - before_unix
                found.setdefault(setting, []).append(spent_s / (checkpoint["step"] - step))
                step, before_unix = checkpoint["step"], checkpoint["ended_unix"]
    return found


def elastic_jobs(here: Workspace, *, rounds: int) -> pd.DataFrame:
    """A row a job: taken, wrong, seconds, predicted, judged."""
    measure_steps(here)
    steps, rows = known_steps(here), []
    for trial in jobs(rounds):
        job = planned(here, trial, steps)
        done = run(here, trial, job)
        body = done["body"]
        for setting, seconds in steps_made(body).items():
            steps.setdefault(setting, []).extend(seconds)
        began = body["starts"][0]["began_unix"]
        losses = [lost - began for lost in body["lost_unix"]]
        wrong = wrong_resumptions(body, job.checkpoint_every)
        wrong += body["checkpoints"][-1]["step"] != job.steps
        row = {"workload": trial.workload, "kind": trial.kind, "hosts": trial.hosts}
        row |= {"taken": done["taken"], "wrong": wrong, "judged": not trial.losses_s}
        rows.append(row | {"seconds": done["seconds"], "predicted": job.seconds(losses)})
        typer.echo(json.dumps(rows[-1]), err=True)
    return pd.DataFrame(rows)


def main(rounds: int = 2, home: Path | None = None, write: Write = False) -> None:
    """Print jobs, lost checkpoints and errors of their seconds; `home` keeps the measurements."""
    text = "".join(
        type_text(
            name, cores=0.4, gbps=0.5, more=f"spot_replaced = {str(name == REPLACED).lower()}\n"
        )
        for name in (SHRINKS, REPLACED, STEPS)
    )
    text += "".join(workload_text(name, BATCH) for name in WORKLOADS)
    with project(text, {}, home) as here:
        table = elastic_jobs(here, rounds=rounds)
    show("elastic jobs", table)
    taken, wrong = int(table["taken"].sum()), int(table["wrong"].sum())
    judged = table[table["judged"]]
    off = float((judged["predicted"] / judged["seconds"] - 1).abs().mean())
    result = f"{wrong} in {taken} revocations"
    claims = [
        Claim("elastic jobs: checkpoints lost", "0 in 30", result, wrong == 0 and taken >= 30),
        Claim("elastic jobs: seconds predicted", "5 % off", f"{off:.1%}", off <= 0.05),
    ]
    report("elastic", claims, write=write)


if __name__ == "__main__":
    typer.run(main)
