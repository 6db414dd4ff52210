-- Grain: one row per machine that was held. startup_s is the time between the request and the
-- machine being at work, null if it never was. hours is how long it was held. interrupted is true
-- if the market took it away at interrupted_at. machines counts the machines of its type, market
-- and zone in the lease.
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
