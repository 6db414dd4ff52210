-- Grain: one row per run that no longer counts: a definition, the torch version or the machine has
-- changed since, or the run used another device than its machine was bought for. Such runs are
-- never pooled with current runs.
create or replace view outdated_runs as
select
    run_id, provider, kind, workload, cluster, layout, batch_per_device, accumulation_steps, strategy, precision, switches,
    workload_digest, instance_types, instance_digests, measured_at, torch_version, image_id, device_names,
    concat_ws(
        ' and ',
        case when not workload_same then 'the workload was changed' end,
        case when not instances_same then 'an instance type was changed' end,
        wrong_device,
        case when not newest_same then 'another torch or another machine measured since' end
    ) as reason
from stg_current
where not (workload_same and instances_same and machine_same)
order by provider, workload, measured_at, run_id;
