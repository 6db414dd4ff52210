-- Grain: one row per checkpoint that a rank wrote in a run by Srift, on instance types whose
-- definition is unchanged. A training run writes to its machine's disk. An elastic run writes to
-- storage that all its machines share.
-- bytes is the size of the model and optimizer state. seconds is the time until the data is on
-- disk. instance_type is the type of the run's first machine.
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
