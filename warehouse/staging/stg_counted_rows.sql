-- Grain: one row a row of stg_import_rows that counts, those of one run_id all: public ones do not beside one's own of the workload.
-- A view of its own, since DuckDB would keep in memory what a query names and reads twice.
create or replace view stg_counted_rows as
select held.*
from stg_import_rows as held
left join stg_own_workloads as own
    on held.is_public and own.provider = held.provider and own.workload = held.workload
where own.workload is null;
