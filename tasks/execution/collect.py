"""End machines that are past their deadline, and load the measurements of all ended leases.

A lease is the record of a launch. This code runs after every launch, before every refresh and in
`srift reap`.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from warehouse import append

from ..providers.base import NotSwept, ProviderError
from ..reporting.progress import reporter
from ..workspace.locking import alone, at_work_elsewhere
from ..workspace.workspace import PROVIDERS, Workspace, open_workspace, spends_money
from .claims import settle
from .job import Served
from .outcomes import refresh_of
from .record_loader import Collected, load_lease

# Machines are bought only if the reaper has checked every region within this time.
SWEPT_WITHIN = timedelta(hours=1)


def collect(workspace: Workspace, now: datetime) -> Collected:
    """Load the results of all ended launches, and delete their leases (records of launches).

    The launches of a refresh that runs in another process are skipped. That process loads them.
    """
    result = Collected()
    with alone(workspace.home, "collect"):
        other = at_work_elsewhere(workspace.home)
        for lease in workspace.provider.ended():
            if other is None or not lease.lease_id.startswith(str(other.get("refresh_id", ""))):
                result.add(load_lease(workspace, lease, now))
                workspace.provider.forget(lease.lease_id)
    return result


def collect_launch(workspace: Workspace, result: Served, now: datetime) -> Collected:
    """Load the results of a launch that just ended, and of all other ended launches.

    result: the result of the launch. If no machines were acquired, `result.rows` is loaded.
    """
    # a launch without machines has written no files
    if result.mailbox is None:
        rows = [{"ended_unix": now.timestamp()} | row for row in result.rows]
        with workspace.warehouse.transact() as connection:
            append.append_records(
                connection, rows, refresh_id=refresh_of(result.lease_id), loaded_at=now
            )
    return collect(workspace, now)


def reap_now(provider: str | None) -> list[str]:
    """End overdue machines, and load the records of ended launches.

    Prints and returns one sentence per action.

    provider: the provider's name. None means all providers that this SRIFT_HOME has used. The
        providers whose machines cost money come first.

    Raises NotSwept, after all other work, if some machines could not be checked.
    """
    actions, unswept = list[str](), dict[str, str]()
    paid_first = sorted(PROVIDERS, key=lambda name: not spends_money(name))
    for workspace in map(open_workspace, [provider] if provider else paid_first):
        try:
            if provider or workspace.provider.was_used():
                actions += end_and_collect(workspace, datetime.now(UTC))
        except NotSwept as error:
            actions += error.done
            unswept |= error.unswept
        except Exception as error:
            if provider:
                raise
            unswept[workspace.provider.name] = str(error)
    if unswept:
        raise NotSwept(provider or "", unswept, actions)
    return actions


def end_and_collect(workspace: Workspace, now: datetime) -> list[str]:
    """End the machines of overdue and abandoned launches, then load the records of ended launches.

    A launch is abandoned if the process that launched it has died. Prints and returns one sentence
    per action. Raises NotSwept, after all other work, if some machines could not be checked.
    """
    unswept: dict[str, str] = {}
    try:
        actions = workspace.provider.reap(now)
    except NotSwept as error:
        unswept, actions = error.unswept, error.done
    say_all([*actions, *unswept.values()])
    workspace.warehouse.create()
    result = collect(workspace, now)
    if not unswept:
        settle(workspace, now)
    notes = result.notes
    if result.new:
        notes.append(f"{result.new} rows were loaded into the warehouse")
    say_all(notes)
    if unswept:
        raise NotSwept(workspace.provider.name, unswept, [*actions, *notes])
    return [*actions, *notes]


def say_all(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        reporter().say(sentence)


def refuse_unless_swept(workspace: Workspace, now: datetime) -> None:
    """Raise ProviderError unless all configured regions were searched for overdue machines.

    The last search of a region must be at most one hour old. Call this function before buying
    machines.
    """
    regions = workspace.provider.not_swept_since(now - SWEPT_WITHIN)
    if regions:
        raise ProviderError(
            "nothing was bought: in the last hour, no search for overdue machines covered"
            f" {', '.join(regions)}. Run `srift reap --provider {workspace.provider.name}`, then"
            " try again"
        )
