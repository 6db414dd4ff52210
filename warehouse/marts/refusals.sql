-- Grain: one row per request for machines that was refused for lack of capacity, with the market
-- and the zone of the request.
create or replace view refusals as
select provider, lease_id, cluster, market, zone, measured_at as refused_at
from raw_runs
where kind = 'launch' and status = 'refused'
order by provider, refused_at, run_id;
