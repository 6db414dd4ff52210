-- Grain: one row per row of stg_import_rows that counts. Several rows may still have the same
-- run_id. Packaged rows (the public step times that ship with Srift) do not count if this
-- installation has its own rows or its own definition of the workload.
-- This is a separate view, because stg_imports reads it twice. DuckDB would keep a common table
-- expression in memory.
create or replace view stg_counted_rows as
select held.*
from stg_import_rows as held
left join stg_own_workloads as own
    on held.is_public and own.provider = held.provider and own.workload = held.workload
where own.workload is null;
