-- Grain: one row a run attempted here (raw_records), its setup and its raw values out of the JSON.
create or replace view stg_records as
select
    run_id,
    provider,
    lease_id,
    refresh_id,
    kind,
    status,
    coalesce(json_extract_string(body, '$.reason'), '') as reason,
    coalesce(json_extract_string(body, '$.cause'), '') as cause,
    case when json_extract(body, '$.attempt') is null then 'controller' else 'node' end as told_by,
    coalesce(json_extract_string(body, '$.setup.workload'), '') as workload,
    coalesce(
        nullif(json_extract_string(body, '$.workload_digest'), ''), json_extract_string(body, '$.setup.workload_digest'), ''
    ) as workload_digest,
    json_extract_string(body, '$.setup.cluster') as cluster,
    json_extract_string(body, '$.setup.layout') as layout,
    json_extract_string(body, '$.setup.batch_per_device') as batch_per_device,
    try_cast(json_extract_string(body, '$.setup.accumulation_steps') as integer) as accumulation_steps,
    json_extract_string(body, '$.setup.strategy') as strategy,
    json_extract_string(body, '$.setup.precision') as precision,
    json_extract_string(body, '$.setup.switches') as switches,
    json_extract_string(body, '$.setup.market') as market,
    json_extract_string(body, '$.setup.zone') as zone,
    json_extract_string(body, '$.setup.region') as region,
    json_extract_string(body, '$.setup.instance_types[*]') as instance_types,
    json_extract_string(body, '$.setup.instance_digests[*]') as instance_digests,
    try_cast(json_extract_string(body, '$.setup.usd_per_hour') as double) as usd_per_hour,
    json_extract_string(body, '$.setup.code_commit') as code_commit,
    json_extract_string(body, '$.setup.reason_wanted') as reason_wanted,
    json_extract_string(body, '$.fingerprint') as fingerprint,
    json_extract_string(body, '$.torch_version') as torch_version,
    -- '2.13.0+cu130' is of line 2.13; what is no such number is a line of its own
    coalesce(
        nullif(regexp_extract(json_extract_string(body, '$.torch_version'), '^\d+\.\d+'), ''),
        json_extract_string(body, '$.torch_version')
    ) as torch_line,
    json_extract_string(body, '$.setup.image_id') as image_id,
    json_extract_string(body, '$.devices[*].name') as device_names,
    try_cast(json_extract(body, '$.devices[*].threads') as integer[]) as device_threads,
    json_extract_string(body, '$.wrong_device') as wrong_device,
    coalesce(
        make_timestamp((try_cast(json_extract_string(body, '$.ended_unix') as double) * 1e6)::bigint), loaded_at
    ) as measured_at,
    json_extract(body, '$.item') as item,
    json_extract(body, '$.values') as measured,
    loaded_at
from raw_records;
