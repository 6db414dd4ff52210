-- Flattens the records in the relation `texts`: `body` is a record (tasks/node/record.py) with its
-- setup, refresh_id and loaded_at as JSON. The result has one JSON object per record, whose keys
-- include the columns of raw_runs. If several sections of a record have the same key, the last
-- section in json_merge_patch counts.
with sections as (
    select
        body,
        case json_type(body, '$.item') when 'OBJECT' then body -> '$.item' else '{}' end as item,
        case json_type(body, '$.values') when 'OBJECT' then body -> '$.values' else '{}' end as measured,
        body -> '$.setup' as setup
    from texts
)
select
    json_merge_patch(
        json_object('measured_at', body ->> '$.loaded_at'),
        item,
        measured,
        setup,
        body,
        json_object(
            'workload', coalesce(nullif(body ->> '$.workload', ''), nullif(setup ->> '$.workload', ''), ''),
            'workload_digest', coalesce(nullif(body ->> '$.workload_digest', ''), nullif(setup ->> '$.workload_digest', ''), ''),
            'reason', coalesce(nullif(body ->> '$.reason', ''), nullif(setup ->> '$.reason', ''), ''),
            'cause', coalesce(nullif(body ->> '$.cause', ''), nullif(setup ->> '$.cause', ''), ''),
            'told_by', if(json_exists(body, '$.attempt'), 'node', 'controller'),
            'losses', measured -> '$.losses',
            'lost_unix', setup -> '$.losses[*].lost_unix',
            'device_names', body ->> '$.devices[*].name',
            'device_threads', body -> '$.devices[*].threads'
        ),
        case
            when try_cast(body ->> '$.ended_unix' as double) <> 0
                then json_object('measured_at', make_timestamp(((body ->> '$.ended_unix')::decimal(38, 9) * 1000000)::bigint))
            else '{}'
        end
    ) as body
from sections
