-- Grain: one row a provider and workload whose definition was noted: the newest one.
create or replace view stg_workloads as
select
    provider,
    workload,
    digest,
    try_cast(json_extract_string(body, '$.parameters') as bigint) as parameters,
    try_cast(json_extract_string(body, '$.gradient_bytes') as bigint) as gradient_bytes,
    try_cast(json_extract_string(body, '$.flops_per_sample') as double) as flops_per_sample,
    try_cast(json_extract_string(body, '$.samples') as bigint) as samples,
    noted_at
from raw_workload_facts
where digest <> ''
qualify row_number() over (partition by provider, workload order by noted_order desc) = 1;
