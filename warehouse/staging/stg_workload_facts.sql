-- Grain: one row a provider and workload whose facts came with an import that was not forgotten: of each fact the newest
-- that was given, so that a later file that leaves one out takes nothing back; one's own come before the package's (imports
-- called public-...), which do not count where the workload is one's own. `body` is the newest as it came.
create or replace view stg_workload_facts as
with counted as (
    select * replace (noted_order + case when starts_with(import_id, 'public-') then 0 else 1000000000000000 end as noted_order)
    from raw_workload_facts as facts
    where digest = ''
        and (import_id is null or import_id not in (select import_id from stg_import_files where forgotten))
        and (
            import_id is null
            or not starts_with(import_id, 'public-')
            or not exists (
                select 1
                from stg_own_workloads as own
                where own.provider = facts.provider and own.workload = facts.workload
            )
        )
)
select
    provider,
    workload,
    arg_max(try_cast(json_extract_string(body, '$.parameters') as bigint), noted_order) as parameters,
    arg_max(try_cast(json_extract_string(body, '$.gradient_bytes') as bigint), noted_order) as gradient_bytes,
    arg_max(try_cast(json_extract_string(body, '$.flops_per_sample') as double), noted_order) as flops_per_sample,
    arg_max(try_cast(json_extract_string(body, '$.samples') as bigint), noted_order) as samples,
    arg_max(body, noted_order) as body
from counted
group by provider, workload;
