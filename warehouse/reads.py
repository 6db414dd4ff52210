"""Read the warehouse as pandas frames. Comments in marts/*.sql describe the columns."""

import hashlib
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import pandas as pd

from .append import in_utc
from .database import SQL_FOLDER, Warehouse, rows_of_query, select

TRAINING_FRAMES = ("runs", "profiles", "buckets", "probes", "workloads", "instance_types")
# Columns that distinguish the setups of a workload.
SETUP = (
    *("workload", "cluster", "layout", "batch_per_device", "accumulation_steps"),
    *("strategy", "precision", "switches"),
)

MOST_REPEATS, MOST_SETUPS = 20, 9000
LEARNED = (
    f"every run that Srift measured, and the newest {MOST_REPEATS} imported runs of each of at most"
    f" {MOST_SETUPS:,} setups, spread evenly over workloads and clusters"
)
# The query chooses setups before runs, so that only the runs of chosen setups are sorted. It takes
# turns between the workloads, and within a workload between the clusters. Within a cluster, a hash
# orders the setups.
_LEARNED_RUNS = f"""
    with setups as (
        select workload, cluster, hash({", ".join(SETUP)}) as setup,
            md5(concat_ws('|', {", ".join(SETUP)})) as chance
        from stg_imports
        where provider = $provider
        group by {", ".join(SETUP)}
    ),
    by_cluster as (
        select *, row_number() over (partition by workload, cluster order by chance) as place
        from setups
    ),
    by_workload as (
        select setup, chance,
            row_number() over (partition by workload order by place, chance) as turn
        from by_cluster
    ),
    taken as (
        select setup
        from by_workload
        order by turn, chance
        limit {MOST_SETUPS}
    ),
    rows as (
        select run_id, measured_at, hash({", ".join(SETUP)}) as setup
        from stg_imports
        where provider = $provider
    ),
    newest as (
        select run_id
        from rows
        where setup in (select setup from taken)
        qualify row_number() over (
            partition by setup order by measured_at desc nulls last, run_id
        ) <= {MOST_REPEATS}
    )
    select *
    from runs
    where provider = $provider and (source = 'srift' or run_id in (select run_id from newest))
    order by provider, workload, cluster, run_id
"""


def measured_setups(warehouse: Warehouse, provider: str, workloads: Iterable[str]) -> pd.DataFrame:
    """Return one row for each measured setup of the workloads.

    The columns are SETUP (workload, cluster, batch per device, strategy, ...), `runs` (number of
    measurements) and `measured_at` (time of the newest measurement).
    """
    query = f"""
        select {", ".join(SETUP)}, count(*)::integer as runs, max(measured_at) as measured_at
        from stg_runs
        where provider = $provider and list_contains($workloads, workload)
        group by all
        order by all
    """
    return warehouse.select(query, {"provider": provider, "workloads": list(workloads)})


def measured_workloads(warehouse: Warehouse, provider: str) -> dict[str, int]:
    """Return {workload: number of runs in the mart `runs`}."""
    query = "select workload, count(*) from stg_runs where provider = ? group by 1"
    with warehouse.read() as connection:
        return dict(connection.execute(query, [provider]).fetchall())


def training_frames(warehouse: Warehouse, provider: str) -> dict[str, pd.DataFrame]:
    """Return the frames on which a model is fitted, as {name in TRAINING_FRAMES: frame}.

    The frame `runs` has all runs that Srift measured, and a selection of the imported runs. The
    selection has at most MOST_SETUPS setups, with the newest MOST_REPEATS runs of each setup.
    """
    marts = {name: name for name in TRAINING_FRAMES}
    return _frames(warehouse, provider, marts | {"runs": _LEARNED_RUNS})


def training_digest(frames: dict[str, pd.DataFrame]) -> str:
    """Return a digest of the frames' contents, regardless of the order of rows and columns."""
    whole = hashlib.sha256()
    for name, frame in sorted(frames.items()):
        header, *lines = frame.sort_index(axis=1).to_csv(index=False).splitlines()
        whole.update("\n".join([name, header, *sorted(lines), ""]).encode())
    return whole.hexdigest()[:16]


def advised_rates(warehouse: Warehouse, provider: str) -> dict[str, float]:
    """Return the provider's spot interruption rates, {instance type: interruptions per hour}.

    A rate is the mean over the instance type's newest spot offers in all regions and zones.
    """
    query = """
        select instance_type, avg(interruptions_per_hour)
        from offers
        where provider = ? and market = 'spot' and interruptions_per_hour is not null
        group by 1
    """
    with warehouse.read() as connection:
        return dict(connection.execute(query, [provider]).fetchall())


def launch_events(warehouse: Warehouse, provider: str) -> dict[str, pd.DataFrame]:
    """Return events of past launches, such as starts, refusals and restarts, as {name: frame}.

    A name is either a mart ("checkpoints", "compilations" or "restarts") or the name of a file in
    launches/ without ".sql", such as "starts".
    """
    queries = {file.stem: file.read_text() for file in SQL_FOLDER.glob("launches/*.sql")}
    marts = {name: name for name in ("checkpoints", "compilations", "restarts")}
    return _frames(warehouse, provider, queries | marts)


def _frames(
    warehouse: Warehouse, provider: str, queries: Mapping[str, str]
) -> dict[str, pd.DataFrame]:
    """Return the provider's rows of several marts or queries, as {name: frame}.

    queries: {name: name of a mart, or the text of a query}.
    """
    with warehouse.read() as connection:
        return {
            name: select(connection, query, {"provider": provider})
            for name, query in queries.items()
        }


def workload_providers(warehouse: Warehouse) -> set[tuple[str, str]]:
    """Return the pairs (workload, provider) that have measured rows, imported rows or facts."""
    query = """
        select workload, provider from stg_imports
        union
        select workload, provider from stg_workload_facts
        union
        select workload, provider from stg_current where workload_same and kind <> 'probe'
    """
    with warehouse.read() as connection:
        return set(connection.execute(query).fetchall())


SPEND_BY = {
    "day": "strftime(ended_at, '%Y-%m-%d')",
    "campaign": "refresh_id",
    "workload": "workload",
    "type": """
        array_to_string(list_sort(list_distinct(regexp_extract_all(cluster, 'x([^+]+)', 1))), '+')
    """,
}


def lease_spend(
    warehouse: Warehouse, provider: str, by: str, since: datetime
) -> list[dict[str, Any]]:
    """Return the cost of leases (records of launches) by group, with the total as the first row.

    The columns are:

        of: name of the group.
        leases: number of leases.
        runs: number of runs.
        usd: dollars; None if a price is unknown.

    by: how to group the leases: "day", "campaign", "workload" or "type".
    since: leases that ended before this time are left out.
    """
    query = f"""
        select {SPEND_BY[by]} as "of", count(distinct lease_id)::integer as leases,
            coalesce(sum(runs), 0)::integer as runs,
            case when count(*) = count(usd) then coalesce(sum(usd), 0) end as usd
        from lease_spend
        where provider = $provider and ended_at >= $since
        group by grouping sets (({SPEND_BY[by]}), ())
        order by grouping({SPEND_BY[by]}) desc, 1
    """
    with warehouse.read() as connection:
        return rows_of_query(connection, query, {"provider": provider, "since": in_utc(since)})


def report_rows(warehouse: Warehouse) -> dict[str, list[dict[str, Any]]]:
    """Run the queries report/*.sql, and return {file name without suffix: rows}."""
    with warehouse.read() as connection:
        return {
            file.stem: rows_of_query(connection, file.read_text())
            for file in sorted(SQL_FOLDER.glob("report/*.sql"))
        }
