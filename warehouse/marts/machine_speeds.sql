-- Grain: one row a run measured here on today's machines (of any kind: train, profile, probe) and machine that took part
-- and reported seconds of the fixed work beside it. What is usual is over all rows of the instance type. Runs from before
-- that was recorded have no row.
create or replace view machine_speeds as
with timed as (
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
    from timed
    group by provider, instance_type
)
select
    timed.run_id, timed.provider, timed.refresh_id, timed.lease_id, timed.kind, timed.place, coalesce(timed.node, 0) as node,
    timed.instance_type, coalesce(timed.zone, '') as zone, timed.reference_s, timed.reference_spread,
    timed.reference_blocks, usual.usual_s, usual.usual_spread, timed.measured_at
from timed
join usual on usual.provider = timed.provider and usual.instance_type = timed.instance_type
order by timed.provider, timed.measured_at, timed.run_id, timed.place;

comment on view machine_speeds is 'One row a measured run and machine: seconds of the same fixed work, which say how fast the machine was at that hour.';
comment on column machine_speeds.node is 'The machine in its launch, counted from 0. No unit.';
comment on column machine_speeds.place is 'The machine among those of the run, counted from 1. No unit.';
comment on column machine_speeds.reference_s is 'Fixed work on the slowest device of the machine, median over the blocks of the run. Unit: seconds.';
comment on column machine_speeds.reference_spread is 'Standard deviation over median of the fixed work between the blocks of the run. No unit.';
comment on column machine_speeds.reference_blocks is 'Blocks of the run, each with the fixed work before and after it. No unit.';
comment on column machine_speeds.usual_s is 'Median of reference_s over the machines of the instance type. Unit: seconds.';
comment on column machine_speeds.usual_spread is 'Standard deviation of the logarithm of reference_s over them, by its quartiles. No unit.';
