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
    coalesce(
        make_timestamp((try_cast(json_extract_string(body, '$.ended_unix') as double) * 1e6)::bigint), loaded_at
    ) as measured_at,
    json_extract(body, '$.values') as measured,
    loaded_at
from raw_records;
