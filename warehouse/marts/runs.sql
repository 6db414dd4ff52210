-- Grain: one row per training run that counts: runs that Srift measured under the current
-- definitions, and imported runs, which have no digests and always count. Units are seconds and
-- bytes; measured_at is UTC.
-- reference_s has the duration of the reference (a fixed computation) on each machine,
-- usual_reference_s its usual duration on each machine's instance type. Both are null if unknown.
create or replace view runs as
with speeds as (
    select
        run_id,
        list(reference_s order by place) as reference_s,
        list(usual_s order by place) as usual_reference_s,
        max(reference_spread) as reference_spread,
        max(reference_blocks) as reference_blocks
    from machine_speeds
    group by run_id
),
here as (
    select
        run_id, provider, workload, cluster, layout, batch_per_device,
        accumulation_steps,
        strategy,
        precision,
        switches,
        step_s,
        sync_s,
        step_spread,
        parameters,
        gradient_bytes,
        flops_per_sample,
        input_s,
        loader_workers,
        market, zone, measured_at, 'srift' as source
    from stg_current
    where kind = 'train' and workload_same and instances_same and machine_same
),
elsewhere as (
    select
        run_id, provider, workload, cluster, layout, batch_per_device, accumulation_steps, strategy, precision, switches,
        step_s, sync_s, null::double as step_spread, parameters, gradient_bytes, flops_per_sample,
        null::double as input_s, null::integer as loader_workers,
        market, zone, measured_at, source
    from stg_imports
),
pooled as (
    select * from here
    union all
    select * from elsewhere
)
select
    pooled.* replace (
        coalesce(workloads.parameters, pooled.parameters) as parameters,
        coalesce(workloads.gradient_bytes, pooled.gradient_bytes) as gradient_bytes,
        coalesce(workloads.flops_per_sample, pooled.flops_per_sample) as flops_per_sample
    ),
    speeds.reference_s,
    speeds.usual_reference_s,
    speeds.reference_spread,
    speeds.reference_blocks
from pooled
left join speeds on speeds.run_id = pooled.run_id and pooled.source = 'srift'
left join workloads on workloads.provider = pooled.provider and workloads.workload = pooled.workload;
