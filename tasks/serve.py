"""The Prefect task around one launch: turns a line of the shopping list into a job, shows it, serves it."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from models.campaign import Launch, Wanted

from .benchmark import Served, serve
from .installation import Installation
from .jobs import job_of
from .report import reporter
from .shopping import launch_seed
from .tally import Tally


@task(cache_policy=NO_CACHE)
def serve_launch(here: Installation, launch: Launch, lease_id: str, tally: Tally) -> Served:
    """Acquire, measure and release one cluster within the caps of `tally`; its mailbox waits to be loaded."""
    seed = launch_seed(here.settings.campaign.seed, lease_id)
    job = job_of(launch, here.settings, lease_id=lease_id, seed=seed, deadline_s=2 * launch.est_s)
    names = {item.run_id: _label(launch, wanted) for item, wanted in zip(job.items, launch.items, strict=True)}

    def watch(run_id: str, done: int, usd: float | None) -> None:
        spent = None if usd is None else tally.usd + usd
        reporter().watch(f"{launch.cluster.name}: {names[run_id]}", tally.runs + done, spent)

    return serve(here.provider, job, stop_at=tally.stop_of(launch), watch=watch)


def _label(launch: Launch, wanted: Wanted) -> str:
    hosts = f"{len(wanted.nodes)} of {len(launch.cluster.members)} hosts"
    return " ".join(part for part in (wanted.kind, wanted.workload, "on", hosts) if part)
