-- Grain: one row a training run measured here under today's definitions: what tells which part of its step was slow, and
-- what it ran on.
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
    coalesce(accumulation_steps, 1) as accumulation_steps,
    coalesce(strategy, 'ddp') as strategy,
    coalesce(precision, 'fp32') as precision,
    coalesce(switches, 'none') as switches,
    coalesce(zone, '') as zone,
    json_extract_string(measured, '$.step_s')::double as step_s,
    try_cast(json_extract_string(measured, '$.sync_s') as double) as sync_s,
    try_cast(json_extract_string(measured, '$.step_spread') as double) as step_spread,
    try_cast(json_extract_string(measured, '$.input_s') as double) as input_s,
    try_cast(json_extract_string(measured, '$.loader_workers') as integer) as loader_workers,
    try_cast(json_extract(measured, '$.rank_compute_s') as double[]) as rank_compute_s,
    try_cast(json_extract(measured, '$.rank_order') as integer[]) as rank_order,
    try_cast(json_extract_string(measured, '$.taken_share') as double) as taken_share,
    speeds.reference_s,
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

comment on column run_details.input_s is 'Seconds of the step spent waiting for the next batch, or making it, at the slowest rank; null before that was recorded.';
comment on column run_details.loader_workers is 'Processes that load for each device, 0 for the rank itself; null where batches come from no loader.';
comment on column run_details.rank_order is 'Machines in the order in which they sent to each other, counted from 0 as the cluster has them; null where links were not measured: fewer than 4, or more than 16.';
comment on column run_details.torch_version is 'Version of torch that measured it, exactly; runs are pooled by its major.minor.';
comment on column run_details.image_id is 'Machine image that its machines started from; null where there is none, or it is not known.';
comment on column run_details.device_names is 'Of each machine that took part: the device that the run used, as torch names it; null or empty before that was recorded.';
comment on column run_details.device_threads is 'Of each machine that took part: threads that each of its ranks computed with.';
comment on column run_details.reference_s is 'Of each machine that took part: seconds of the fixed work beside the run; null before that was recorded.';
comment on column run_details.usual_reference_s is 'Of each machine that took part: the median of that over all machines of its type.';
comment on column run_details.usual_spread is 'Standard deviation of the logarithm of that over all machines of the type, at most of the types that took part.';
