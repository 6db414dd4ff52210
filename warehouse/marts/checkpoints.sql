-- Grain: one row a checkpoint that was written here on today's machines, by one rank: of a training run to its machine's
-- disk, of an elastic run where all its machines find it. The state of model and optimizer: bytes; seconds until the disk
-- had all of it. instance_type is the writer's.
create or replace view checkpoints as
with timed as (
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
),
of_elastic as (
    select run_id, body, loaded_at, unnest(json_extract(body, '$.values.checkpoints[*]')) as written
    from raw_elastic
    where status = 'measured'
),
resumable as (
    select
        of_elastic.run_id,
        first.provider,
        first.workload,
        first.instance_type,
        json_extract_string(written, '$.bytes')::bigint as bytes,
        json_extract_string(written, '$.seconds')::double as seconds,
        of_elastic.loaded_at as measured_at
    from of_elastic
    join stg_elastic as first on first.run_id = of_elastic.run_id and first.number = 1
    semi join stg_instance_types
        on stg_instance_types.provider = first.provider
        and stg_instance_types.name = first.instance_type
        and stg_instance_types.digest = first.instance_digest
)
select * from timed
union all
select * from resumable
order by provider, measured_at, run_id;
