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
)
select
    counted.* replace (
        coalesce(workloads.parameters, counted.parameters) as parameters,
        coalesce(workloads.gradient_bytes, counted.gradient_bytes) as gradient_bytes,
        coalesce(workloads.flops_per_sample, counted.flops_per_sample) as flops_per_sample
    ),
    speeds.reference_s,
    speeds.usual_reference_s,
    speeds.reference_spread,
    speeds.reference_blocks
from stg_runs as counted
left join speeds on speeds.run_id = counted.run_id and counted.source = 'srift'
left join workloads on workloads.provider = counted.provider and workloads.workload = counted.workload;
