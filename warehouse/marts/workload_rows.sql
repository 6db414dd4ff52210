-- Grain: one row per provider, workload and cluster measured under today's definitions: the number
-- of rows measured here, of packaged rows (public) and of other imported rows, and the newest
-- measurement in UTC.
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
