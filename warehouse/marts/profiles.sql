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
    max(usual_s) as usual_reference_s
from lines
group by all
order by all;
