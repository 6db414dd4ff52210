-- Grain: one row a run measured here on today's machines (of any kind: train, profile, probe) and machine that took part
-- and told seconds of the fixed work beside it. What is usual is over all rows of the instance type. Runs from before
-- that was recorded have no row.
create or replace view machine_speeds as
with told as (
    select
        run_id,
        provider,
        refresh_id,
        lease_id,
        kind,
        zone,
        measured_at,
        unnest(instance_types) as instance_type,
        unnest(try_cast(json_extract(item, '$.nodes') as integer[])) as node,
        unnest(try_cast(json_extract(measured, '$.reference_s') as double[])) as reference_s,
        unnest(range(1, len(instance_types) + 1)) as place,
        try_cast(json_extract_string(measured, '$.reference_spread') as double) as reference_spread,
        try_cast(json_extract_string(measured, '$.reference_blocks') as integer) as reference_blocks
    from stg_current
    where instances_same and machine_same
        and json_array_length(measured, '$.reference_s') = len(instance_types)
),
usual as (
    select
        provider,
        instance_type,
        median(reference_s) as usual_s,
        (quantile_cont(ln(reference_s), 0.75) - quantile_cont(ln(reference_s), 0.25)) / 1.349 as usual_spread
    from told
    group by provider, instance_type
)
select
    told.run_id, told.provider, told.refresh_id, told.lease_id, told.kind, told.place, coalesce(told.node, 0) as node,
    told.instance_type, coalesce(told.zone, '') as zone, told.reference_s, told.reference_spread,
    told.reference_blocks, usual.usual_s, usual.usual_spread, told.measured_at
from told
join usual on usual.provider = told.provider and usual.instance_type = told.instance_type
order by told.provider, told.measured_at, told.run_id, told.place;

comment on view machine_speeds is 'One row a measured run and machine: seconds of the same fixed work, which say how fast the machine was at that hour.';
comment on column machine_speeds.node is 'The machine in its launch, counted from 0. No unit.';
comment on column machine_speeds.place is 'The machine among those of the run, counted from 1. No unit.';
comment on column machine_speeds.reference_s is 'Fixed work on the slowest device of the machine, median over the blocks of the run. Unit: seconds.';
comment on column machine_speeds.reference_spread is 'Standard deviation over median of the fixed work between the blocks of the run. No unit.';
comment on column machine_speeds.reference_blocks is 'Blocks of the run, each with the fixed work before and after it. No unit.';
comment on column machine_speeds.usual_s is 'Median of reference_s over the machines of the instance type. Unit: seconds.';
comment on column machine_speeds.usual_spread is 'Standard deviation of the logarithm of reference_s over them, by its quartiles. No unit.';
