-- Grain: one row per training run with torch.compile that Srift measured under the current
-- definitions. seconds is the time from the start of the entrypoint until step times are steady,
-- which is nearly all compilation.
create or replace view compilations as
select run_id, provider, workload, cluster, precision, strategy, switches, build_s + warmup_s as seconds, measured_at
from stg_current
where kind = 'train' and workload_same and instances_same and machine_same
    and list_contains(string_split(switches, '+'), 'compile') and build_s + warmup_s > 0
order by provider, measured_at, run_id;
