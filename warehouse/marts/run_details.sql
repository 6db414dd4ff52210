-- Grain: one row per training run that Srift measured under the current definitions, with details
-- that show which part of the step was slow and what software and devices the run used.
create or replace view run_details as
with speeds as (
    select
        run_id,
        list(reference_s order by place) as reference_s,
        list(usual_s order by place) as usual_reference_s,
        max(usual_spread) as usual_spread
    from machine_speeds
    group by run_id
)
select
    stg_current.run_id,
    provider,
    workload,
    cluster,
    layout,
    batch_per_device,
    accumulation_steps,
    strategy,
    precision,
    switches,
    coalesce(zone, '') as zone,
    step_s,
    sync_s,
    step_spread,
    input_s,
    loader_workers,
    rank_compute_s,
    rank_order,
    taken_share,
    speeds.reference_s as reference_s,
    speeds.usual_reference_s,
    speeds.usual_spread,
    measured_at,
    torch_version,
    image_id,
    device_names,
    device_threads
from stg_current
left join speeds on speeds.run_id = stg_current.run_id
where kind = 'train' and workload_same and instances_same and machine_same
order by provider, measured_at, stg_current.run_id;
