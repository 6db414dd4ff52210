"""Publish a new table at current prices, then read it: python from_a_flow.py PUBLISHED_FOLDER

Needs prefect, duckdb, and a server with Srift's deployments (`make up`, or `prefect deploy`).
"""

import sys

import duckdb
from prefect import flow
from prefect.deployments import run_deployment


@flow(log_prints=True)
def choose(folder: str) -> str:
    """Return one line per goal, with the first choice at current prices."""
    run = run_deployment("refresh/refresh-nightly", parameters={"max_usd": 0}, timeout=600)
    assert run.state is not None and run.state.is_completed(), run.state
    with duckdb.connect(f"{folder}/recommendations.duckdb", read_only=True) as table:
        rows = table.execute(
            "select workload, goal, coalesce(cluster, status) from recommendations where rank = 1"
        )
        said = [" ".join(row) for row in rows.fetchall()]
    return "\n".join(said) or "nothing is recommended yet"


if __name__ == "__main__":
    print(choose(*sys.argv[1:]))
