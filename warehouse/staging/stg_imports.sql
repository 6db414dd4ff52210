-- Grain: one row a measurement made elsewhere (raw_imports), its columns out of the JSON. Those that no import holds
-- but forgotten ones do not count; of one run_id with several values, those loaded first do. Public rows (of an import
-- called public-..., and of no other) say so in `source`, and do not count beside one's own of the workload.
create or replace view stg_imports as
with held as (
    select row_digest, bool_and(starts_with(import_id, 'public-')) as is_public
    from raw_import_rows
    where import_id not in (select import_id from stg_import_files where forgotten)
    group by row_digest
),
counted as (
    select raw_imports.identity, raw_imports.provider, raw_imports.body, held.is_public
    from raw_imports
    join held on held.row_digest = raw_imports.row_digest
    where
        not held.is_public
        or not exists (
            select 1
            from stg_own_workloads as own
            where
                own.provider = raw_imports.provider
                and own.workload = json_extract_string(raw_imports.body, '$.workload')
        )
    qualify row_number() over (
            partition by raw_imports.identity order by raw_imports.loaded_at, raw_imports.row_digest
        )
        = 1
)
select
    identity as run_id,
    provider,
    json_extract_string(body, '$.workload') as workload,
    json_extract_string(body, '$.cluster') as cluster,
    json_extract_string(body, '$.layout') as layout,
    json_extract_string(body, '$.batch_per_device') as batch_per_device,
    json_extract_string(body, '$.accumulation_steps')::integer as accumulation_steps,
    json_extract_string(body, '$.strategy') as strategy,
    json_extract_string(body, '$.precision') as precision,
    coalesce(json_extract_string(body, '$.switches'), 'none') as switches,
    json_extract_string(body, '$.step_s')::double as step_s,
    json_extract_string(body, '$.sync_s')::double as sync_s,
    json_extract_string(body, '$.parameters')::bigint as parameters,
    json_extract_string(body, '$.gradient_bytes')::bigint as gradient_bytes,
    json_extract_string(body, '$.flops_per_sample')::double as flops_per_sample,
    json_extract_string(body, '$.market') as market,
    json_extract_string(body, '$.zone') as zone,
    json_extract_string(body, '$.measured_at')::timestamp as measured_at,
    case
        when is_public then 'public: AdaptDL''s OSDI''21 artifact'
        else coalesce(json_extract_string(body, '$.source'), 'import')
    end as source,
    is_public
from counted;
