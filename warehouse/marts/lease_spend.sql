-- Grain: one row per lease and workload that ran on it. A lease is the record of one launch of a
-- cluster. Its dollars are divided equally among its runs. workload is empty for runs without a
-- workload (probes) and for a lease without runs. usd is null if the price is unknown.
create or replace view lease_spend as
with runs as (
    select provider, lease_id, workload, count(*) as runs, runs / sum(runs) over (partition by provider, lease_id) as part
    from raw_runs
    where kind <> 'launch'
    group by provider, lease_id, workload
)
select
    leases.provider,
    leases.lease_id,
    leases.refresh_id,
    leases.cluster,
    leases.market,
    leases.started_at,
    leases.ended_at,
    leases.outcome,
    coalesce(runs.workload, '') as workload,
    coalesce(runs.runs, 0) as runs,
    leases.usd * coalesce(runs.part, 1) as usd
from raw_leases as leases
left join runs on runs.provider = leases.provider and runs.lease_id = leases.lease_id
order by leases.provider, leases.started_at, leases.lease_id, coalesce(runs.workload, '');
