-- Grain: one row a request for machines that were not to be had, on the market and in the zone that was asked.
create or replace view refusals as
select provider, lease_id, cluster, market, zone, measured_at as refused_at
from raw_runs
where kind = 'launch' and status = 'refused'
order by provider, refused_at, run_id;
