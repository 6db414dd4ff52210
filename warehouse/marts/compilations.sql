-- Grain: one row per compiled training run measured here under today's definitions. seconds last
-- from the start of the entrypoint until steps are steady; nearly all of this time is compilation.
create or replace view compilations as
select run_id, provider, workload, cluster, precision, strategy, switches, build_s + warmup_s as seconds, measured_at
from stg_current
where kind = 'train' and workload_same and instances_same and machine_same
    and list_contains(string_split(switches, '+'), 'compile') and build_s + warmup_s > 0
order by provider, measured_at, run_id;
