-- Grain: one row a checkpoint written here on today's machines, by one rank: of a training run to its machine's disk, of
-- an elastic run to where all its machines find it. Bytes of the model's and the optimizer's state, and seconds until the
-- disk had them. instance_type is the writer's.
create or replace view checkpoints as
with resumable as (
    select run_id, provider, workload, instance_types[1] as instance_type, instance_digests[1] as instance_digest,
        unnest(checkpoints) as written, loaded_at
    from raw_runs
    where kind = 'elastic' and status = 'measured'
)
select run_id, provider, workload, instance_types[1] as instance_type, checkpoint_bytes as bytes, checkpoint_s as seconds,
    measured_at
from stg_current
where kind = 'train' and instances_same and machine_same and checkpoint_s is not null and checkpoint_bytes is not null
union all
select run_id, provider, workload, instance_type, written.bytes, written.seconds, loaded_at
from resumable
semi join stg_instance_types as types
    on types.provider = resumable.provider and types.name = instance_type and types.digest = instance_digest
order by provider, measured_at, run_id;
