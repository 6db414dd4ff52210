-- Grain: one row per row of stg_import_rows that counts; all rows of a run_id are kept here.
-- Packaged rows do not count if this installation has its own rows or definition of the workload.
-- This is a separate view, since DuckDB would keep in memory what a query names and reads twice.
create or replace view stg_counted_rows as
select held.*
from stg_import_rows as held
left join stg_own_workloads as own
    on held.is_public and own.provider = held.provider and own.workload = held.workload
where own.workload is null;
