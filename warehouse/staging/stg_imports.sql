-- Grain: one row a measurement made elsewhere (raw_imports), its columns out of the JSON. Those that no import holds
-- but forgotten ones do not count; of one run_id with several values, those loaded first do.
create or replace view stg_imports as
with counted as (
    select identity, provider, body
    from raw_imports
    where row_digest in (
        select row_digest
        from raw_import_rows
        where import_id not in (select import_id from stg_import_files where forgotten)
    )
    qualify row_number() over (partition by identity order by loaded_at, row_digest) = 1
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
    coalesce(json_extract_string(body, '$.source'), 'import') as source
from counted;
