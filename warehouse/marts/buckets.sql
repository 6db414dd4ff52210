-- Grain: one row a provider, workload, mode and gradient bucket, in the order in which they become ready. The bucket sizes
-- are those of the newest current profile; ready_fraction (0..1 of backward time) is the median over profiles of the same sizes.
create or replace view buckets as
with profiled as (
    select
        run_id,
        provider,
        workload,
        coalesce(precision, 'fp32') as precision,
        coalesce(switches, 'none') as switches,
        json_extract(measured, '$.buckets[*]') as lines,
        json_extract(measured, '$.buckets[*].bytes')::varchar as sizes,
        measured_at
    from stg_current
    where kind = 'profile' and workload_same and instances_same and machine_same
),
newest as (
    select provider, workload, precision, switches, sizes
    from profiled
    where len(lines) > 0
    qualify row_number() over (partition by provider, workload, precision, switches order by measured_at desc, run_id) = 1
),
numbered as (
    select
        profiled.provider,
        profiled.workload,
        profiled.precision,
        profiled.switches,
        unnest(range(len(profiled.lines)))::integer as bucket,
        unnest(profiled.lines) as line
    from profiled
    join newest
        on newest.provider = profiled.provider and newest.workload = profiled.workload
        and newest.precision = profiled.precision
        and newest.switches = profiled.switches and newest.sizes = profiled.sizes
)
select
    provider,
    workload,
    precision,
    switches,
    bucket,
    any_value(json_extract_string(line, '$.bytes')::bigint) as bytes,
    median(json_extract_string(line, '$.ready_fraction')::double) as ready_fraction
from numbered
group by provider, workload, precision, switches, bucket
order by provider, workload, precision, switches, bucket;
