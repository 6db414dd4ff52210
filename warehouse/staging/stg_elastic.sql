-- Grain: one row a start of an elastic run's workers, in order: on how many machines, at which step, how many more had been
-- done before, and when. lost_unix is when the controller last saw a machine gone between the start before and this one;
-- null where none was. restore_s and restore_bytes are of the checkpoint that it resumed from; null where there was none.
create or replace view stg_elastic as
with starts as (
    select
        run_id,
        provider,
        json_extract_string(body, '$.setup.workload') as workload,
        json_extract_string(body, '$.setup.workload_digest') as workload_digest,
        json_extract_string(body, '$.setup.instance_types[0]') as instance_type,
        json_extract_string(body, '$.setup.instance_digests[0]') as instance_digest,
        json_extract(body, '$.setup.losses[*].lost_unix')::double[] as losses,
        unnest(json_extract(body, '$.values.starts[*]')) as start,
        generate_subscripts(json_extract(body, '$.values.starts[*]'), 1) as number,
        loaded_at
    from raw_elastic
    where status = 'measured'
),
read as (
    select
        * exclude (start),
        json_array_length(start, '$.nodes')::integer as machines,
        json_extract_string(start, '$.step')::integer as step,
        json_extract_string(start, '$.lost_steps')::integer as lost_steps,
        json_extract_string(start, '$.last_unix')::double as last_unix,
        json_extract_string(start, '$.began_unix')::double as began_unix,
        json_extract_string(start, '$.restore_s')::double as restore_s,
        json_extract_string(start, '$.restore_bytes')::bigint as restore_bytes
    from starts
),
before as (
    select
        *,
        lag(machines) over (partition by run_id order by number) as machines_before,
        lag(began_unix) over (partition by run_id order by number) as began_before_unix
    from read
)
select
    * exclude (losses),
    list_max(list_filter(losses, one -> one between began_before_unix and began_unix)) as lost_unix
from before;
