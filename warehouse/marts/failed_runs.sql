-- Grain: one row a run that gave no measurement, with the reason, who reported it (node or controller) and the cause:
-- machine where it lacked its devices, data where its workload's data could not be had, install where its
-- requirements were not installed in time or no index answered, else empty.
create or replace view failed_runs as
select
    run_id, provider, lease_id, refresh_id, kind, status, workload, workload_digest, cluster, layout, batch_per_device,
    accumulation_steps, strategy, precision, switches, market, zone, reason, cause, told_by, measured_at as ended_at, image_id
from stg_records
where status <> 'measured'
order by provider, ended_at, run_id;
