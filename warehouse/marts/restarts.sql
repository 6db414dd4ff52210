-- Grain: one row a restart of an elastic run's workers on a type that is still defined as it was. outcome: 'fewer' (a
-- machine was lost, and those left went on), 'replaced' (one was lost, and another took its place before), 'grown' (one
-- joined while others worked). seconds from the loss, or of 'grown' from the last step before, to the first step after,
-- without restore_s, in which the checkpoint of restore_bytes was read back; both null where there was none. lost_steps
-- were done again. instance_type is that of the run's first machine.
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
