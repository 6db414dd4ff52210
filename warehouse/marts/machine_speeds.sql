-- Grain: one row per machine of each current run (train, profile or probe) with a measured
-- reference. A run is current if its definitions and machines are unchanged (see stg_current).
-- reference_s is the duration of the reference, a fixed computation that shows how fast the machine
-- was. usual_s is the median of reference_s over all rows of the instance type.
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
        unnest(nodes) as node,
        unnest(reference_s) as reference_s,
        unnest(range(1, len(instance_types) + 1)) as place,
        reference_spread,
        reference_blocks
    from stg_current
    where instances_same and machine_same
        and len(reference_s) = len(instance_types)
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
