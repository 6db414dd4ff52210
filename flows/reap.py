"""The flow that ends overdue and orphaned machines, and loads their measurements."""

from datetime import UTC, datetime

from prefect import flow, task

from tasks.execution.collect import end_and_collect
from tasks.workspace.workspace import open_workspace

# Ending machines again is harmless, and loaded records are not loaded again.
end_overdue = task(retries=2, retry_delay_seconds=2)(end_and_collect)


@flow(name="reap", flow_run_name="reap {provider}", log_prints=True)
def reap(provider: str = "local") -> list[str]:
    """End overdue and orphaned machines, load their measurements, and return a sentence per action.

    A machine is orphaned if the process that launched it has ended.
    Raises NotSwept if a region or a lease (the record of a launch) could not be checked.
    """
    return end_overdue(open_workspace(provider), datetime.now(UTC))
