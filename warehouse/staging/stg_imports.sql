-- Grain: one row a measurement made elsewhere (raw_imports), its columns out of the JSON.
create or replace view stg_imports as
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
    json_extract_string(body, '$.step_s')::double as step_s,
    json_extract_string(body, '$.sync_s')::double as sync_s,
    json_extract_string(body, '$.parameters')::bigint as parameters,
    json_extract_string(body, '$.gradient_bytes')::bigint as gradient_bytes,
    json_extract_string(body, '$.flops_per_sample')::double as flops_per_sample,
    json_extract_string(body, '$.market') as market,
    json_extract_string(body, '$.zone') as zone,
    json_extract_string(body, '$.measured_at')::timestamp as measured_at,
    coalesce(json_extract_string(body, '$.source'), 'import') as source
from raw_imports;
