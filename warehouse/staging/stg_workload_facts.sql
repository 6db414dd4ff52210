-- Grain: one row a provider and workload whose facts came with an import: the newest ones.
create or replace view stg_workload_facts as
select
    provider,
    workload,
    try_cast(json_extract_string(body, '$.parameters') as bigint) as parameters,
    try_cast(json_extract_string(body, '$.gradient_bytes') as bigint) as gradient_bytes,
    try_cast(json_extract_string(body, '$.flops_per_sample') as double) as flops_per_sample,
    try_cast(json_extract_string(body, '$.samples') as bigint) as samples
from raw_workload_facts
where digest = ''
qualify row_number() over (partition by provider, workload order by noted_order desc) = 1;
