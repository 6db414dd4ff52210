-- Grain: one row per learning run attempted here, with its seed, strategy and precision. losses has
-- the mean loss of each window of steps, or is null. Runs of another definition of the workload
-- have another workload_digest.
create or replace view learning as
select
    run_id, provider, status, reason, cause, told_by, workload, workload_digest, cluster, layout, batch_per_device, strategy,
    precision, switches, seed, steps_a_window, losses, diverged, loaded_at
from raw_runs
where kind = 'learn'
order by provider, workload, strategy, seed, run_id;
