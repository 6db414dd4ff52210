-- Grain: one row per elastic run (a run that continues when machines are lost or added) that Srift
-- attempted: how it ended, its steps and losses, and the numbers of worker starts, lost machines
-- and repeated steps. seconds is the time from the first step to the last checkpoint.
create or replace view elastic_runs as
select
    run_id, provider, status, reason, workload, workload_digest, cluster, market, batch_per_device, steps, checkpoint_every,
    len(starts)::integer as starts,
    coalesce(len(lost_unix), 0)::integer as lost_machines,
    list_sum([start.lost_steps for start in starts])::integer as lost_steps,
    first_loss, last_loss,
    checkpoints[-1].ended_unix - starts[1].began_unix as seconds,
    loaded_at
from raw_runs
where kind = 'elastic'
order by provider, loaded_at, run_id;
