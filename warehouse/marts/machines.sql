-- Grain: one row per machine that Srift held. startup_s is the time from the request until the
-- machine was ready for work. It is null for replacements, and for machines that were never ready.
-- hours is how long the machine was held. interrupted is true if the market took the machine away;
-- interrupted_at is the time. machines counts the machines of the same type, market and zone in the
-- lease.
create or replace view machines as
select
    provider,
    lease_id,
    node,
    number,
    instance_type,
    market,
    zone,
    asked_at,
    startup_s,
    hours,
    interrupted,
    case when interrupted then asked_at + to_microseconds((hours * 3.6e9)::bigint) end as interrupted_at,
    count(*) over (partition by provider, lease_id, instance_type, market, zone) as machines
from raw_machines
order by provider, asked_at, lease_id, node, number;
