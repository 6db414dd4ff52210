-- Grain: one row per train, profile, probe or launch run without a measurement. told_by is who
-- reported the reason: node or controller. cause is machine (devices were missing), data (the
-- workload's data was not available), install (requirements could not be installed) or empty.
create or replace view failed_runs as
select
    run_id, provider, lease_id, refresh_id, kind, status, workload, workload_digest, cluster, layout, batch_per_device,
    accumulation_steps, strategy, precision, switches, market, zone, reason, cause, told_by, measured_at as ended_at, image_id
from raw_runs
where status <> 'measured' and kind in ('train', 'profile', 'probe', 'launch')
order by provider, ended_at, run_id;
