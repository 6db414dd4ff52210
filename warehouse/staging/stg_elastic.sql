-- Grain: one row per elastic run and start of its workers (`number`, from 1). step is the step at
-- which the workers started. lost_steps is the number of completed steps that must be repeated.
-- lost_unix is the time at which the controller noticed the last loss of a machine between the
-- previous start and this start.
-- restore_s and restore_bytes describe the checkpoint that was read. Without a checkpoint, both are
-- null.
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
