-- Grain: one row per measured run that no longer counts. Its workload or instance type has been
-- redefined, a newer run used another torch version or machine, or the run used another device than
-- its instance type has. Outdated runs are never pooled with current runs.
create or replace view outdated_runs as
select
    run_id, provider, kind, workload, cluster, layout, batch_per_device, accumulation_steps, strategy, precision, switches,
    workload_digest, instance_types, instance_digests, measured_at, torch_version, image_id, device_names,
    concat_ws(
        ' and ',
        case when not workload_same then 'the definition of the workload was changed' end,
        case when not instances_same then 'the definition of an instance type was changed' end,
        wrong_device,
        case when not newest_same then 'a newer run used another torch version or machine' end
    ) as reason
from stg_current
where not (workload_same and instances_same and machine_same)
order by provider, workload, measured_at, run_id;
