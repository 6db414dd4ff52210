-- Grain: one row per claim that is not settled, oldest first. A claim reserves the dollars that a
-- campaign (the launches of one refresh) may cost. left_usd is the claimed dollars minus the known
-- cost of the campaign's leases. place names the machine and the SRIFT_HOME of the campaign.
create or replace view claims as
with spent as (
    select provider, refresh_id, sum(usd) as usd from raw_leases group by provider, refresh_id
)
select
    claimed.provider, claimed.refresh_id, claimed.place, claimed.usd,
    greatest(claimed.usd - coalesce(spent.usd, 0), 0) as left_usd, claimed.noted_at, claimed.may_cost_until,
    claimed.noted_order
from raw_claims as claimed
left join raw_claims as settled
    on settled.provider = claimed.provider and settled.refresh_id = claimed.refresh_id and settled.event = 'settled'
left join spent on spent.provider = claimed.provider and spent.refresh_id = claimed.refresh_id
where claimed.event = 'claimed' and settled.event is null
order by claimed.noted_order;
