-- Grain: one row a learning run attempted here: from a seed, in a strategy and precision, the mean loss of each window of
-- steps. Null where it has none. Those of another definition of the workload have another workload_digest.
create or replace view learning as
select
    run_id,
    provider,
    status,
    coalesce(json_extract_string(body, '$.reason'), '') as reason,
    coalesce(json_extract_string(body, '$.cause'), '') as cause,
    case when json_extract(body, '$.attempt') is null then 'controller' else 'node' end as told_by,
    json_extract_string(body, '$.setup.workload') as workload,
    json_extract_string(body, '$.setup.workload_digest') as workload_digest,
    json_extract_string(body, '$.setup.cluster') as cluster,
    json_extract_string(body, '$.setup.layout') as layout,
    json_extract_string(body, '$.setup.batch_per_device') as batch_per_device,
    json_extract_string(body, '$.setup.strategy') as strategy,
    json_extract_string(body, '$.setup.precision') as precision,
    json_extract_string(body, '$.setup.switches') as switches,
    try_cast(json_extract_string(body, '$.item.seed') as bigint) as seed,
    try_cast(json_extract_string(body, '$.values.steps_a_window') as integer) as steps_a_window,
    try_cast(json_extract(body, '$.values.losses') as double[]) as losses,
    try_cast(json_extract_string(body, '$.values.diverged') as boolean) as diverged,
    loaded_at
from raw_learning
order by provider, workload, strategy, seed, run_id;
