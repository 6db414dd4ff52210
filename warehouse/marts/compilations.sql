-- Grain: one row a compiled training run measured here on today's definitions. seconds from its entrypoint until its steps
-- were steady, which is compiling and little else.
create or replace view compilations as
select run_id, provider, workload, cluster, precision, strategy, switches, build_s + warmup_s as seconds, measured_at
from stg_current
where kind = 'train' and workload_same and instances_same and machine_same
    and list_contains(string_split(switches, '+'), 'compile') and build_s + warmup_s > 0
order by provider, measured_at, run_id;
