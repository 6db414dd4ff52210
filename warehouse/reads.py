"""What others read from the warehouse, as frames whose columns the marts document. Never computes features."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import duckdb
import pandas as pd

from .database import Warehouse, WarehouseMissing, has_relation, select

TRAINING_FRAMES = ("runs", "profiles", "buckets", "probes", "workloads", "instance_types")


# What a decision reads, of its provider.
_OF_A_DECISION = (
    "instance_types",
    "offers",
    "workloads",
    "machines",
    "refusals",
    "checkpoints",
    "compilations",
    "restarts",
    "learning",
)
# What tells the setups of a workload apart in a measurement row.
_SETUP = (
    *("workload", "cluster", "layout", "batch_per_device", "accumulation_steps"),
    *("strategy", "precision", "switches"),
)
_MEASURED_SETUPS = f"""
    select {", ".join(_SETUP)}, count(*)::integer as runs, max(measured_at) as measured_at
    from runs
    where provider = $provider and workload = $workload
    group by all
    order by all
"""


MOST_REPEATS, MOST_SETUPS = 20, 9000  # of setups as many as a fit of step times takes
LEARNED = (
    f"all that were measured here, and of imported ones the newest {MOST_REPEATS} of each setup and"
    f" {MOST_SETUPS:,} setups, evenly by workload and its clusters"
)
# Setups are chosen first, so that of millions of rows only theirs are sorted: every workload's first cluster's first
# setup, and so on. What comes first within a cluster is by chance, for ever the same.
_LEARNED_RUNS = f"""
    with setups as (
        select workload, cluster, hash({", ".join(_SETUP)}) as setup,
            md5(concat_ws('|', {", ".join(_SETUP)})) as chance
        from stg_imports
        where provider = $provider
        group by {", ".join(_SETUP)}
    ),
    by_cluster as (
        select *, row_number() over (partition by workload, cluster order by chance) as place
        from setups
    ),
    by_workload as (
        select setup, chance, row_number() over (partition by workload order by place, chance) as turn
        from by_cluster
    ),
    taken as (
        select setup
        from by_workload
        order by turn, chance
        limit {MOST_SETUPS}
    ),
    rows as (
        select run_id, measured_at, hash({", ".join(_SETUP)}) as setup
        from stg_imports
        where provider = $provider
    ),
    newest as (
        select run_id
        from rows
        where setup in (select setup from taken)
        qualify row_number() over (partition by setup order by measured_at desc nulls last, run_id) <= {MOST_REPEATS}
    )
    select *
    from runs
    where provider = $provider and (source = 'srift' or run_id in (select run_id from newest))
    order by provider, workload, cluster, run_id
"""


class Snapshot(Warehouse):
    """The warehouse as it was at one moment, for one decision: read once in one transaction, asked as often as needed.

    It answers `select` for what a decision reads; anything else is read from the warehouse `of` as it is then.
    """

    def __init__(
        self, of: Warehouse, *, provider: str, workload: str, taken: Mapping[str, pd.DataFrame]
    ) -> None:
        super().__init__(of.path)
        self._of = of
        self._about = {"provider": provider, "workload": workload}
        self._taken = dict(taken)

    def exists(self) -> bool:
        """It was read."""
        return True

    @contextmanager
    def _open(self, *, read_only: bool) -> Iterator[duckdb.DuckDBPyConnection]:
        with self._of.read() if read_only else self._of.transact() as connection:
            yield connection

    def select(self, relation: str, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """As `Warehouse.select`."""
        wanted = dict(params or {})
        of_snapshot = (
            self._about if relation == _MEASURED_SETUPS else {"provider": self._about["provider"]}
        )
        if relation not in self._taken or not wanted.items() >= of_snapshot.items():
            return super().select(relation, params)
        frame = self._taken[relation]
        for column in wanted.keys() - of_snapshot.keys():
            frame = frame[frame[column] == wanted[column]]
        return frame.reset_index(drop=True)

    def frames(self, relations: Mapping[str, Mapping[str, Any]]) -> dict[str, pd.DataFrame]:
        """As `Warehouse.frames`."""
        if not self._taken.keys() >= relations.keys():
            return super().frames(relations)
        return {name: self.select(name, params) for name, params in relations.items()}


def snapshot(warehouse: Warehouse, provider: str, workload: str) -> Warehouse:
    """What a decision about a workload reads, all of one moment; `warehouse` itself where there is none yet.

    Raises WarehouseBusy.
    """
    if not warehouse.exists():
        return warehouse
    with warehouse.read() as connection:
        known = [name for name in _OF_A_DECISION if has_relation(connection, name)]
        taken = {name: select(connection, name, {"provider": provider}) for name in known}
        if has_relation(connection, "runs"):
            of = {"provider": provider, "workload": workload}
            taken[_MEASURED_SETUPS] = select(connection, _MEASURED_SETUPS, of)
    return Snapshot(warehouse, provider=provider, workload=workload, taken=taken)


def measured_setups(warehouse: Warehouse, provider: str, workload: str) -> pd.DataFrame:
    """The setups on which the workload was measured, as rows of the mart `runs` spell them: how many `runs` each has,
    and when the last was `measured_at`.
    """
    return warehouse.select(_MEASURED_SETUPS, {"provider": provider, "workload": workload})


def setups_of_workloads(
    warehouse: Warehouse, provider: str, workloads: Iterable[str]
) -> pd.DataFrame:
    """As `measured_setups`, of several workloads."""
    query = _MEASURED_SETUPS.replace("workload = $workload", "list_contains($workloads, workload)")
    return warehouse.select(query, {"provider": provider, "workloads": list(workloads)})


def measured_workloads(warehouse: Warehouse, provider: str) -> dict[str, int]:
    """How many measurements of each workload count today, of those that have any, by name."""
    frame = warehouse.select(
        "select workload, count(*)::integer as runs from runs where provider = $provider group by workload order by 1",
        {"provider": provider},
    )
    return dict(zip(frame["workload"].tolist(), frame["runs"].tolist(), strict=True))


def training_frames(warehouse: Warehouse, provider: str) -> dict[str, pd.DataFrame]:
    """The frames that a model is fitted on, of one provider and one moment, by name; of `runs` what LEARNED says."""
    with warehouse.read() as connection:
        queries = {name: name for name in TRAINING_FRAMES} | {"runs": _LEARNED_RUNS}
        return {
            name: select(connection, query, {"provider": provider})
            for name, query in queries.items()
        }


def counted_runs(warehouse: Warehouse, provider: str) -> int:
    """How many runs count, those that a model does not learn from too."""
    frame = warehouse.select(
        "select count(*) as runs from runs where provider = $provider", {"provider": provider}
    )
    return int(frame["runs"].iloc[0])


def training_digest(frames: dict[str, pd.DataFrame]) -> str:
    """Sixteen hex digits that change whenever a value or a column of the frames does; row order does not count."""
    whole = hashlib.sha256()
    for name in sorted(frames):
        frame = frames[name].reindex(sorted(frames[name].columns), axis=1)
        whole.update(f"{name}:{','.join(frame.columns)}\n".encode())
        for line in sorted(frame.to_csv(index=False, header=False).splitlines()):
            whole.update(line.encode() + b"\n")
    return whole.hexdigest()[:16]


def offers(warehouse: Warehouse, provider: str) -> pd.DataFrame:
    """The provider's newest snapshot of prices; unknown dollars are NaN."""
    return warehouse.select("offers", {"provider": provider})


def drifting(warehouse: Warehouse, provider: str) -> pd.DataFrame:
    """Rows of the mart `drift` that are drifting now; none before the first refresh, or the first of this version."""
    if not warehouse.exists():
        return pd.DataFrame()
    return warehouse.frames({"drift": {"provider": provider, "drifting": True}})["drift"]


def torch_lines(warehouse: Warehouse, provider: str) -> dict[str, int]:
    """Lines of torch (major.minor) under which runs that count today were measured, with how many runs each."""
    if not warehouse.exists():
        return {}
    with warehouse.read() as connection:
        if not has_relation(connection, "torch_lines"):
            return {}
        lines = select(connection, "torch_lines", {"provider": provider})
    return {
        str(line): int(runs) for line, runs in zip(lines["torch_line"], lines["runs"], strict=True)
    }


def learning(warehouse: Warehouse, provider: str) -> pd.DataFrame:
    """Rows of the mart `learning`; none before the first refresh of this version."""
    if not warehouse.exists():
        return pd.DataFrame()
    return warehouse.frames({"learning": {"provider": provider}})["learning"]


_LAUNCHED = ("machines", "refusals", "checkpoints", "compilations", "restarts")


def launched(warehouse: Warehouse, provider: str) -> tuple[pd.DataFrame, ...]:
    """The marts `machines`, `refusals`, `checkpoints`, `compilations` and `restarts`; empty before the first refresh of
    this version."""
    if not warehouse.exists():
        return tuple(pd.DataFrame() for _ in _LAUNCHED)
    found = warehouse.frames({name: {"provider": provider} for name in _LAUNCHED})
    return tuple(found[name] for name in _LAUNCHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownToImport:
    """What an import is compared with: facts that came with imports, workloads and instance types; how many imported
    `rows` count.
    """

    rows: int
    facts: pd.DataFrame
    workloads: pd.DataFrame
    instance_types: pd.DataFrame


_SETUP_OF_ROW = f"provider, {', '.join(_SETUP)}"


def known_to_import(connection: duckdb.DuckDBPyConnection) -> KnownToImport:
    """Of every provider, at this moment."""
    counted = connection.execute("select count(*) from stg_imports").fetchone()
    return KnownToImport(
        rows=int(counted[0]) if counted else 0,
        facts=select(connection, "stg_workload_facts"),
        workloads=select(connection, "workloads"),
        instance_types=select(connection, "instance_types"),
    )


def seconds_by_setup(
    connection: duckdb.DuckDBPyConnection, workloads: Iterable[str]
) -> pd.DataFrame:
    """`least_s` and `most_s` of each setup of the workloads, of runs that count, of every provider."""
    query = f"""
        select {_SETUP_OF_ROW}, min(step_s) as least_s, max(step_s) as most_s
        from runs
        where list_contains($workloads, workload)
        group by all
    """
    return select(connection, query, {"workloads": sorted(workloads)})


def workload_providers(warehouse: Warehouse) -> set[tuple[str, str]]:
    """(workload, provider) wherever a provider has rows or facts of a workload; none before the first refresh."""
    if not warehouse.exists():
        return set()
    query = """
        select workload, provider from stg_imports
        union
        select workload, provider from stg_workload_facts
        union
        select workload, provider from stg_current where workload_same and kind <> 'probe'
    """
    with warehouse.read() as connection:
        if not has_relation(connection, "stg_imports"):
            return set()
        return set(connection.execute(query).fetchall())


def public_rows(warehouse: Warehouse, provider: str) -> dict[str, int]:
    """How many public step times that came with the package count of each workload; none before they were loaded."""
    if not warehouse.exists():
        return {}
    frame = warehouse.frames({"public_rows": {"provider": provider}})["public_rows"]
    return (
        dict(zip(frame["workload"], frame["rows"].astype(int).tolist(), strict=True))
        if len(frame)
        else {}
    )


def knows_import(warehouse: Warehouse, import_id: str) -> bool:
    """Whether an import of that id was ever made here, forgotten since or not."""
    if not warehouse.exists():
        return False
    return (
        len(warehouse.frames({"stg_import_files": {"import_id": import_id}})["stg_import_files"])
        > 0
    )


def lease_spend(warehouse: Warehouse, provider: str) -> pd.DataFrame:
    """Dollars by lease and workload. Raises WarehouseMissing where there is no warehouse, or one of an older version
    that does not tell."""
    with warehouse.read() as connection:
        if not has_relation(connection, "lease_spend"):
            raise WarehouseMissing(
                f"{warehouse} is of an older version, which cannot tell what was spent on what: the next"
                " `srift refresh` or `srift import` brings it up to date"
            )
        return select(connection, "lease_spend", {"provider": provider})


# What the newest refresh of each provider that held machines did, and what came of it.
_LAST_REFRESH = """
    with newest as (
        select provider, refresh_id
        from spend
        qualify row_number() over (partition by provider order by started_at desc, refresh_id desc) = 1
    )
"""
_REPORTED = {
    "publications": """
        select provider, publication_id, published_at, refresh_id, model_version,
            lag(published_at) over (partition by provider order by published_at, noted_order) as previous_published_at
        from raw_publications
        qualify row_number() over (partition by provider order by published_at desc, noted_order desc) = 1
        order by provider
    """,
    "model_versions": "model_versions",
    "scoreboards": """
        select scores.*
        from scores
        join model_versions using (provider, version, refresh_id)
        where scores."group" = 'all'
        qualify dense_rank() over (
            partition by scores.provider order by model_versions.trained_at desc, scores.refresh_id desc
        ) = 1
        order by scores.provider, scores.split
    """,
    "spend": "spend",
    "last_spend": f"""
        {_LAST_REFRESH}
        select provider, refresh_id, workload, sum(runs)::integer as runs, count(*)::integer as leases,
            case when bool_and(usd is not null) then sum(usd) end as usd
        from lease_spend
        join newest using (provider, refresh_id)
        group by all
        order by provider, usd desc nulls last, workload
    """,
    "last_measured": f"""
        {_LAST_REFRESH}
        select provider, kind, workload, {", ".join(_SETUP[1:])}, market, count(*)::integer as runs,
            median(try_cast(json_extract_string(measured, '$.step_s') as double)) as step_s,
            max(measured_at) as measured_at, any_value(reason_wanted) as reason_wanted
        from stg_records
        join newest using (provider, refresh_id)
        where status = 'measured' and kind <> 'launch'
        group by all
        order by provider, workload, kind, measured_at
    """,
    "last_failed": f"""
        {_LAST_REFRESH}
        select provider, workload, cluster, market, status, reason, count(*)::integer as runs
        from failed_runs
        join newest using (provider, refresh_id)
        group by all
        order by provider, runs desc, workload, cluster
    """,
}


def reported(warehouse: Warehouse) -> dict[str, pd.DataFrame]:
    """What a report tells beside the published relations, of every provider and one moment, by name.

    `publications`: a provider's current one, and when the one before was published. `model_versions` and `spend`: those
    marts. `scoreboards`: the newest version's pooled scores by split. `last_spend`, `last_measured`, `last_failed`: of
    a provider's newest refresh that held machines, dollars by workload, the setups that were measured, the runs that
    gave no measurement. Raises WarehouseBusy, WarehouseMissing.
    """
    with warehouse.read() as connection:
        return {name: select(connection, query) for name, query in _REPORTED.items()}


def mart(warehouse: Warehouse, name: str, **equal: Any) -> pd.DataFrame:
    """Any mart by name (outdated_runs, failed_runs, spend, model_versions, scores, timings), filtered by columns."""
    if not name.isidentifier():
        raise ValueError(f"{name!r} is not the name of a mart")
    return warehouse.select(name, equal)
