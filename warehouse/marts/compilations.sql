-- Grain: one row a training run measured here on today's definitions whose model was compiled. seconds from its entrypoint
-- until its steps were steady: of compiling, and little else.
create or replace view compilations as
select
    run_id,
    provider,
    workload,
    cluster,
    coalesce(precision, 'fp32') as precision,
    coalesce(strategy, 'ddp') as strategy,
    switches,
    json_extract_string(measured, '$.build_s')::double + json_extract_string(measured, '$.warmup_s')::double as seconds,
    measured_at
from stg_current
where kind = 'train' and workload_same and instances_same and machine_same
    and list_contains(string_split(switches, '+'), 'compile')
    and json_extract_string(measured, '$.build_s')::double + json_extract_string(measured, '$.warmup_s')::double > 0
order by provider, measured_at, run_id;
