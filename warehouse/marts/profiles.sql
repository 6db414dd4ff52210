-- Grain: one row a provider, workload, instance type and batch: median seconds on one device over the current profiles.
create or replace view profiles as
with lines as (
    select
        provider,
        workload,
        instance_types[1] as instance_type,
        unnest(json_extract(measured, '$.rows[*]')) as line
    from stg_current
    where kind = 'profile' and workload_same and instances_same and machine_same
)
select
    provider,
    workload,
    instance_type,
    json_extract_string(line, '$.batch')::integer as batch,
    median(json_extract_string(line, '$.forward_s')::double) as forward_s,
    median(json_extract_string(line, '$.backward_s')::double) as backward_s,
    median(json_extract_string(line, '$.optimizer_s')::double) as optimizer_s,
    median(try_cast(json_extract_string(line, '$.input_s') as double)) as input_s,
    max(try_cast(json_extract_string(line, '$.peak_bytes') as double)) as peak_bytes
from lines
group by all
order by all;
