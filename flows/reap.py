"""End machines that outlived their deadline or their controller, and load their measurements."""

from datetime import UTC, datetime

from prefect import flow, task

from tasks.execution.collect import end_and_collect, say_all
from tasks.providers.base import NotSwept
from tasks.workspace.workspace import open_workspace

end_overdue = task(end_and_collect)


@flow(name="reap", flow_run_name="reap {provider}", log_prints=True)
def reap(provider: str = "local") -> list[str]:
    """End overdue or orphaned machines, and load their measurements.

    Returns one sentence for each action. Raises NotSwept if a region or a lease could not be
    checked. The exception makes the flow run fail visibly.
    """
    try:
        sentences = end_overdue(open_workspace(provider), datetime.now(UTC))
    except NotSwept as error:
        say_all(error.done)
        raise
    say_all(sentences)
    return sentences
