-- Grain: one row a measurement made elsewhere that counts: of one run_id with several values those loaded first do. Public
-- rows say so in `source`, and do not count beside one's own of the workload.
create or replace view stg_imports as
with counted as not materialized (
    select held.*
    from stg_import_rows as held
    left join stg_own_workloads as own
        on held.is_public and own.provider = held.provider and own.workload = held.workload
    where own.workload is null
),
rivals as (
    select identity, arg_min(row_digest, {'loaded': loaded_at, 'digest': row_digest}) as first_digest
    from counted
    where identity <> row_digest
    group by identity
    having count(*) > 1
)
select
    counted.identity as run_id,
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
    case when counted.is_public then 'public: AdaptDL''s OSDI''21 artifact' else coalesce(nullif(counted.source, 'srift'), 'import') end
        as source,
    counted.is_public
from counted
left join rivals on rivals.identity = counted.identity
where rivals.identity is null or rivals.first_digest = counted.row_digest;
