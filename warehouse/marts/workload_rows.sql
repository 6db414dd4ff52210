-- Grain: one row a provider, workload and cluster that was measured under today's definitions: how many rows were
-- measured here, how many came with the package (public), how many others were imported, and the newest in UTC.
create or replace view workload_rows as
select
    provider,
    workload,
    cluster,
    count(*) filter (where run_id in (select run_id from raw_runs)) as measured_rows,
    count(*) filter (where source like 'public: %') as public_rows,
    count(*) filter (where run_id not in (select run_id from raw_runs)) - public_rows as imported_rows,
    max(measured_at) as newest_measured_at
from runs
group by provider, workload, cluster
order by provider, workload, cluster;
