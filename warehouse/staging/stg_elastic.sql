-- Grain: one row a start of an elastic run's workers, in order: on how many machines, at which step, how many more steps
-- had been done before, and when. lost_unix is when the controller last saw a machine gone between the start before and
-- this start. restore_s and restore_bytes are of the checkpoint that it resumed from. Null where there was none.
create or replace view stg_elastic as
with starts as (
    select
        run_id,
        provider,
        workload,
        instance_types[1] as instance_type,
        instance_digests[1] as instance_digest,
        lost_unix as losses,
        unnest(starts) as start,
        generate_subscripts(starts, 1) as number,
        loaded_at
    from raw_runs
    where kind = 'elastic' and status = 'measured'
),
read as (
    select
        * exclude (start),
        len(start.nodes)::integer as machines,
        start.step,
        start.lost_steps,
        start.last_unix,
        start.began_unix,
        start.restore_s,
        start.restore_bytes
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
    list_max([lost for lost in losses if lost between began_before_unix and began_unix]) as lost_unix
from before;
