-- Grain: one row a train, profile, probe or launch run without a measurement, with the reason, who reported it (node or
-- controller) and the cause: machine where it lacked its devices, data where its workload's data could not be had,
-- install where its requirements could not be installed, else empty.
create or replace view failed_runs as
select
    run_id, provider, lease_id, refresh_id, kind, status, workload, workload_digest, cluster, layout, batch_per_device,
    accumulation_steps, strategy, precision, switches, market, zone, reason, cause, told_by, measured_at as ended_at, image_id
from raw_runs
where status <> 'measured' and kind in ('train', 'profile', 'probe', 'launch')
order by provider, ended_at, run_id;
