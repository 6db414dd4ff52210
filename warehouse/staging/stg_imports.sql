-- Grain: one row per measurement made elsewhere that counts. If rows with the same run_id differ,
-- the row loaded first counts. `source` marks packaged rows, which ship with Srift, as public.
-- Packaged rows do not count if this installation has its own rows or its own definition of the
-- workload.
create or replace view stg_imports as
with rivals as (
    select run_id, arg_min(row_digest, {'loaded': loaded_at, 'digest': row_digest}) as first_digest
    from stg_counted_rows as counted
    where run_id in (select run_id from raw_imports where run_id is not null group by run_id having count(*) > 1)
    group by run_id
)
select
    coalesce(counted.run_id, counted.row_digest) as run_id,
    counted.provider,
    counted.workload,
    counted.cluster,
    counted.layout,
    counted.batch_per_device,
    try_cast(counted.accumulation_steps as integer) as accumulation_steps,
    counted.strategy,
    counted.precision,
    counted.switches,
    counted.step_s,
    counted.sync_s,
    counted.parameters,
    counted.gradient_bytes,
    counted.flops_per_sample,
    counted.market,
    counted.zone,
    counted.measured_at,
    case when counted.is_public then 'public: ' || counted.source else coalesce(nullif(counted.source, 'srift'), 'import') end
        as source,
    counted.is_public
from stg_counted_rows as counted
left join rivals on rivals.run_id = counted.run_id
where rivals.run_id is null or rivals.first_digest = counted.row_digest;
