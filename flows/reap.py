"""End whatever outlived its deadline or its controller, and bring home what it had measured."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect import flow

from tasks.execution.collect import end_and_collect, say_all
from tasks.providers.base import NotSwept
from tasks.workspace.prefect_runtime import crash_dead_flow_runs, recorded_flow_run
from tasks.workspace.workspace import open_workspace


@flow(name="reap", log_prints=True)
def reap(provider: str = "local") -> list[str]:
    """Returns a sentence for each thing ended; none means that nothing was left running.

    Raises NotSwept where something could not be looked at, so that the run is FAILED and its automations see it.
    """
    workspace = open_workspace(provider)
    with recorded_flow_run(workspace.home):
        try:
            sentences = end_and_collect(workspace, datetime.now(UTC))
        except NotSwept as error:
            say_all([*error.done, *crash_dead_flow_runs(workspace.home)])
            raise
        except Exception:
            say_all(crash_dead_flow_runs(workspace.home))
            raise
        sentences = [
            *sentences,
            *crash_dead_flow_runs(workspace.home),
        ]  # machines first: Prefect may take minutes to answer
    say_all(sentences)
    return sentences
