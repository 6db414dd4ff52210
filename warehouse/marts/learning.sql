-- Grain: one row per attempted learning run, which trains a workload to compare the convergence of
-- strategies. losses has the mean loss of each window of steps, or is null. workload_digest
-- shows whether a run used the current definition of the workload.
create or replace view learning as
select
    run_id, provider, status, reason, cause, told_by, workload, workload_digest, cluster, layout, batch_per_device, strategy,
    precision, switches, seed, steps_a_window, losses, diverged, loaded_at
from raw_runs
where kind = 'learn'
order by provider, workload, strategy, seed, run_id;
