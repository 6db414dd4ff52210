-- Grain: one row per provider, workload, precision, switches, instance type and batch: median
-- seconds of each phase of a step on one device, over the profile runs whose definitions and
-- machines are unchanged (see stg_current).
-- reference_s is the median duration of the reference (a fixed computation) over these runs.
-- usual_reference_s is its usual duration on the instance type.
create or replace view profiles as
with lines as (
    select
        stg_current.provider,
        stg_current.workload,
        stg_current.precision,
        stg_current.switches,
        stg_current.instance_types[1] as instance_type,
        unnest(rows) as line,
        stg_current.loader_workers,
        stg_current.load_s,
        stg_current.load_wait_s,
        machine_speeds.reference_s,
        machine_speeds.usual_s
    from stg_current
    left join machine_speeds on machine_speeds.run_id = stg_current.run_id
    where stg_current.kind = 'profile' and workload_same and instances_same and machine_same
)
select
    provider,
    workload,
    precision,
    switches,
    instance_type,
    line.batch as batch,
    median(line.forward_s) as forward_s,
    median(line.backward_s) as backward_s,
    median(line.optimizer_s) as optimizer_s,
    median(line.input_s) as input_s,
    max(line.peak_bytes) as peak_bytes,
    median(reference_s) as reference_s,
    max(usual_s) as usual_reference_s,
    max(loader_workers) as loader_workers,
    median(load_s) as load_s,
    median(load_wait_s) as load_wait_s
from lines
group by all
order by all;
