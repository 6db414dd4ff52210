-- Grain: one row a machine that was held: seconds from asking for it to its being at work (null: it never was), hours
-- that it was held, whether the market took it away, and when. machines is how many of its type, market and zone the
-- lease had.
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
