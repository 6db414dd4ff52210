-- Grain: one row a checkpoint that a training run wrote here on today's machines, by one rank to its machine's disk: the
-- state of model and optimizer. bytes; seconds until the disk had all of it. instance_type is the writer's.
create or replace view checkpoints as
select
    run_id,
    provider,
    workload,
    instance_types[1] as instance_type,
    json_extract_string(measured, '$.checkpoint_bytes')::bigint as bytes,
    json_extract_string(measured, '$.checkpoint_s')::double as seconds,
    measured_at
from stg_current
where kind = 'train' and instances_same and machine_same
    and json_extract_string(measured, '$.checkpoint_s') is not null
    and json_extract_string(measured, '$.checkpoint_bytes') is not null
order by provider, measured_at, run_id;
