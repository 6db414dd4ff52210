-- Grain: one row a provider, workload, mode, instance type and batch: median seconds on one device over the current profiles;
-- reference_s and usual_reference_s as of the mart `runs`, the first a median over the profiles too.
create or replace view profiles as
with lines as (
    select
        stg_current.provider,
        stg_current.workload,
        coalesce(stg_current.precision, 'fp32') as precision,
        coalesce(stg_current.switches, 'none') as switches,
        stg_current.instance_types[1] as instance_type,
        unnest(json_extract(stg_current.measured, '$.rows[*]')) as line,
        try_cast(json_extract_string(stg_current.measured, '$.loader_workers') as integer) as loader_workers,
        try_cast(json_extract_string(stg_current.measured, '$.load_s') as double) as load_s,
        try_cast(json_extract_string(stg_current.measured, '$.load_wait_s') as double) as load_wait_s,
        try_cast(json_extract_string(stg_current.measured, '$.sample_bytes') as double) as sample_bytes,
        machine_speeds.reference_s,
        machine_speeds.usual_s
    from stg_current
    left join machine_speeds on machine_speeds.run_id = stg_current.run_id
    where stg_current.kind = 'profile' and workload_same and instances_same and machine_same
)
select
    provider,
    workload,
    precision,
    switches,
    instance_type,
    json_extract_string(line, '$.batch')::integer as batch,
    median(json_extract_string(line, '$.forward_s')::double) as forward_s,
    median(json_extract_string(line, '$.backward_s')::double) as backward_s,
    median(json_extract_string(line, '$.optimizer_s')::double) as optimizer_s,
    median(try_cast(json_extract_string(line, '$.input_s') as double)) as input_s,
    max(try_cast(json_extract_string(line, '$.peak_bytes') as double)) as peak_bytes,
    median(reference_s) as reference_s,
    max(usual_s) as usual_reference_s,
    max(loader_workers) as loader_workers,
    median(load_s) as load_s,
    median(load_wait_s) as load_wait_s,
    median(sample_bytes) as sample_bytes
from lines
group by all
order by all;

comment on column profiles.input_s is 'Seconds of forward_s that making the batch took in the process itself.';
comment on column profiles.loader_workers is 'Processes that load for each device in training, 0 for the rank itself; null where batches come from no loader.';
comment on column profiles.load_s is 'Seconds of a processor that a loader takes for one sample; null without a loader.';
comment on column profiles.load_wait_s is 'Seconds that one sample takes beside load_s, waiting for storage or the network; null without a loader.';
comment on column profiles.sample_bytes is 'Bytes of files that a loader reads for one sample; null without a loader.';
