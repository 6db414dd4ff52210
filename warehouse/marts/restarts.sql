-- Grain: one row per restart of the workers of an elastic run, on an instance type whose definition
-- is unchanged. outcome is 'fewer' (a machine was lost, and the remaining machines continued),
-- 'replaced' (a new machine replaced the lost machine before the restart) or 'grown' (a machine was
-- added).
-- seconds is the time from the loss of the machine to the first step after the restart, without
-- restore_s. For 'grown', the time starts at the last step before the restart. restore_s is the
-- time to read the checkpoint, which has restore_bytes. Both are null without a checkpoint.
-- lost_steps is the number of repeated steps. instance_type is the type of the run's first machine.
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
