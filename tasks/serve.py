"""Serve one launch of the shopping list: acquire a cluster, have its job done, release it, whatever happens."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

from models.campaign import Launch, Wanted

from .benchmark import Clock, Job, Served, Stopwatch, Watch, write_rows
from .caps import allowance, patience_s
from .collect import collect
from .installation import Installation
from .jobs import job_of
from .mailbox import WorkloadChanged
from .outcomes import Ended, first_id, full_mailbox, launch_row
from .providers.base import NoCapacity, Provider, ProviderError
from .report import reporter
from .service import Service
from .shopping import launch_seed
from .step import Step
from .tally import Tally


@Step
def serve_launch(here: Installation, launch: Launch, lease_id: str, tally: Tally) -> Served:
    """Acquire, measure and release one cluster within every cap; its mailbox waits to be loaded.

    The caps are asked here, before anything is: a launch whose worst case does not fit comes back as a refused row.

    Where this is cut short (Ctrl-C), what was recorded until then is loaded before the error goes on its way.
    """
    seed = launch_seed(here.settings.campaign.seed, lease_id)
    job = job_of(launch, here.settings, lease_id=lease_id, seed=seed, deadline_s=2 * launch.est_s)
    allowed = allowance(here, launch, tally, datetime.now(UTC))
    if allowed.refusal:
        return _refused(job, allowed.refusal)
    patient_s = patience_s(here, launch, tally, allowed.deadline_s)
    job = replace(job, deadline_s=allowed.deadline_s, patience_s=patient_s)
    names = {item.run_id: _label(launch, wanted) for item, wanted in zip(job.items, launch.items, strict=True)}

    def watch(run_id: str, done: int, usd: float | None) -> None:
        spent = None if usd is None else tally.usd + usd
        reporter().watch(f"{launch.cluster.name}: {names[first_id(run_id)]}", tally.runs + done, spent)

    try:
        return serve(here.provider, job, stop_at=tally.stop_of(launch), watch=watch)
    except BaseException:
        with suppress(Exception):  # the first error is the story; `srift reap` loads what this could not
            collect.fn(here, lease_id.rpartition("-")[0], datetime.now(UTC))
        raise


def serve(provider: Provider, job: Job, *, stop_at: float, watch: Watch, clock: Clock | None = None) -> Served:
    """Run `job` until all is recorded or `stop_at` (on `clock`). Refusals, losses and a full disk come back as rows.

    So does whatever the provider could not do. However this ends, Ctrl-C included, the run under way gets its row, the
    machines are released, and the mailbox stays on disk until it has been loaded.
    """
    served = Served(lease_id=job.lease_id)
    clock = clock or Clock()
    laps = Stopwatch(served.seconds, clock)
    try:
        with provider.acquire(job.cluster, lease_id=job.lease_id, deadline_s=job.deadline_s, seed=job.seed) as running:
            served.mailbox = running.mailbox
            service = Service(running, job, served, stop_at=stop_at, watch=watch, clock=clock, laps=laps)
            try:
                service.prepare()
                service.serve()
            except OSError as error:
                service.lose(Ended(how="lost", reason=full_mailbox(error, running.mailbox)))
            except WorkloadChanged as error:
                service.lose(Ended(how="lost", reason=str(error)))
            except Exception as error:
                service.lose(Ended(how="lost", reason=str(error) or type(error).__name__))
                raise
            except BaseException as error:
                why = "by hand (Ctrl-C)" if isinstance(error, KeyboardInterrupt) else f"({type(error).__name__})"
                service.lose(Ended(how="lost", reason=f"the controller was stopped {why}", interrupted=True))
                raise
            finally:
                service.finish()
    except NoCapacity as refusal:
        served.outcome = f"refused: {refusal}"
        served.rows.append(launch_row(job.lease_id, job.cluster.name, job.envelopes, "refused", str(refusal)))
    except ProviderError as error:  # of this launch: the others, the model and the table do not wait for it
        served.outcome = f"failed: {error}"
        served.rows.append(launch_row(job.lease_id, job.cluster.name, job.envelopes, "failed", str(error)))
    finally:
        write_rows(served)  # what a full disk refused before: the machines' scratch is gone now
    laps.lap("release hosts")
    return served


def _refused(job: Job, why: str) -> Served:
    """Nothing was asked for: the row says which cap stood against it."""
    served = Served(lease_id=job.lease_id, outcome=f"refused: {why}")
    served.rows.append(launch_row(job.lease_id, job.cluster.name, job.envelopes, "refused", why))
    return served


def _label(launch: Launch, wanted: Wanted) -> str:
    hosts = f"{len(wanted.nodes)} of {len(launch.cluster.members)} hosts"
    return " ".join(part for part in (wanted.kind, wanted.workload, "on", hosts) if part)
