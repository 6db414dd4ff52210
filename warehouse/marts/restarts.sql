-- Grain: one row per restart of an elastic run's workers on a type whose definition is unchanged.
-- outcome is 'fewer' (a machine was lost, and the remaining machines continued), 'replaced'
-- (another machine took the place of a lost machine first) or 'grown' (a machine was added).
-- seconds is the time between the loss, or for 'grown' the last step before, and the first step
-- after. It excludes restore_s, in which the checkpoint of restore_bytes was read; both are null
-- without a checkpoint. lost_steps were repeated. instance_type is the type of the run's first
-- machine.
create or replace view restarts as
with told as (
    select
        stg_elastic.*,
        case
            when lost_unix is not null and machines < machines_before then 'fewer'
            when lost_unix is not null and machines = machines_before then 'replaced'
            when lost_unix is null and machines > machines_before then 'grown'
        end as outcome
    from stg_elastic
    semi join stg_instance_types
        on stg_instance_types.provider = stg_elastic.provider
        and stg_instance_types.name = stg_elastic.instance_type
        and stg_instance_types.digest = stg_elastic.instance_digest
    where number > 1
)
select
    run_id,
    number - 1 as number,
    provider,
    workload,
    instance_type,
    outcome,
    machines_before,
    machines,
    began_unix - coalesce(lost_unix, last_unix) - coalesce(restore_s, 0) as seconds,
    restore_s,
    restore_bytes,
    lost_steps,
    loaded_at
from told
where outcome is not null and began_unix - coalesce(lost_unix, last_unix) - coalesce(restore_s, 0) > 0
order by provider, run_id, number;
