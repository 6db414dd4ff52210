-- Grain: one row per probe run and message size, of runs whose instance types and machines are
-- unchanged (see stg_current). seconds is the duration of one all-reduce over one device of each
-- instance; bytes is the message size.
create or replace view probes as
with lines as (
    select run_id, provider, cluster, unnest(rows) as line
    from stg_current
    where kind = 'probe' and instances_same and machine_same
)
select
    run_id,
    provider,
    cluster,
    line.bytes as bytes,
    line.seconds as seconds
from lines
order by provider, cluster, bytes, run_id;
