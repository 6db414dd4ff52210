-- Grain: one row per training run that counts, as in the mart `runs`, without the speeds of machines
-- and without the facts of the mart `workloads`.
create or replace view stg_runs as
with here as (
    select
        run_id, provider, workload, cluster, layout, batch_per_device,
        accumulation_steps,
        strategy,
        precision,
        switches,
        step_s,
        sync_s,
        step_spread,
        parameters,
        gradient_bytes,
        flops_per_sample,
        input_s,
        loader_workers,
        market, zone, measured_at, 'srift' as source
    from stg_current
    where kind = 'train' and workload_same and instances_same and machine_same
),
elsewhere as (
    select
        run_id, provider, workload, cluster, layout, batch_per_device, accumulation_steps, strategy, precision, switches,
        step_s, sync_s, null::double as step_spread, parameters, gradient_bytes, flops_per_sample,
        null::double as input_s, null::integer as loader_workers,
        market, zone, measured_at, source
    from stg_imports
)
select * from here
union all
select * from elsewhere;
