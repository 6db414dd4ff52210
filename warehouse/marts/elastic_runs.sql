-- Grain: one row an elastic run attempted here: how it ended, its steps and losses, how often its workers started, how
-- many machines it lost and steps it did again, and seconds from its first step to its last checkpoint.
create or replace view elastic_runs as
select
    run_id,
    provider,
    status,
    coalesce(json_extract_string(body, '$.reason'), '') as reason,
    json_extract_string(body, '$.setup.workload') as workload,
    json_extract_string(body, '$.setup.workload_digest') as workload_digest,
    json_extract_string(body, '$.setup.cluster') as cluster,
    json_extract_string(body, '$.setup.market') as market,
    json_extract_string(body, '$.setup.batch_per_device') as batch_per_device,
    json_extract_string(body, '$.values.steps')::integer as steps,
    json_extract_string(body, '$.item.checkpoint_every')::integer as checkpoint_every,
    json_array_length(body, '$.values.starts')::integer as starts,
    coalesce(json_array_length(body, '$.setup.losses'), 0)::integer as lost_machines,
    list_sum(json_extract_string(body, '$.values.starts[*].lost_steps')::integer[])::integer as lost_steps,
    json_extract_string(body, '$.values.first_loss')::double as first_loss,
    json_extract_string(body, '$.values.last_loss')::double as last_loss,
    json_extract_string(body, '$.values.checkpoints[#-1].ended_unix')::double
    - json_extract_string(body, '$.values.starts[0].began_unix')::double as seconds,
    loaded_at
from raw_elastic
order by provider, loaded_at, run_id;
