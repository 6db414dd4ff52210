-- Grain: one row per provider, workload, precision, switches and gradient bucket, in the order in
-- which the buckets become ready. Only current profile runs count: their definitions and machines
-- are unchanged (see stg_current).
-- The newest current run determines the bucket sizes. ready_fraction (0 to 1 of the backward time)
-- is the median over all current runs with these sizes.
create or replace view buckets as
with profiled as (
    select run_id, provider, workload, precision, switches, buckets, [one.bytes for one in buckets] as sizes, measured_at
    from stg_current
    where kind = 'profile' and workload_same and machine_same and instances_same
),
newest as (
    select provider, workload, precision, switches, sizes
    from profiled
    where len(buckets) > 0
    qualify row_number() over (partition by provider, workload, precision, switches order by measured_at desc, run_id) = 1
),
numbered as (
    select
        profiled.* exclude (buckets), unnest(range(len(buckets)))::integer as bucket, unnest(buckets, recursive := true)
    from profiled
    semi join newest using (provider, workload, precision, switches, sizes)
)
select provider, workload, precision, switches, bucket, any_value(bytes) as bytes, median(ready_fraction) as ready_fraction
from numbered
group by provider, workload, precision, switches, bucket
order by provider, workload, precision, switches, bucket;
