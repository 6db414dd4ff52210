-- Grain: one row a provider and workload whose facts came with an import that was not forgotten: of each fact the newest
-- that was given, so that a later file that leaves one out takes nothing back. `body` is the newest as it came.
create or replace view stg_workload_facts as
select
    provider,
    workload,
    arg_max(try_cast(json_extract_string(body, '$.parameters') as bigint), noted_order) as parameters,
    arg_max(try_cast(json_extract_string(body, '$.gradient_bytes') as bigint), noted_order) as gradient_bytes,
    arg_max(try_cast(json_extract_string(body, '$.flops_per_sample') as double), noted_order) as flops_per_sample,
    arg_max(try_cast(json_extract_string(body, '$.samples') as bigint), noted_order) as samples,
    arg_max(body, noted_order) as body
from raw_workload_facts
where digest = ''
    and (import_id is null or import_id not in (select import_id from stg_import_files where forgotten))
group by provider, workload;
