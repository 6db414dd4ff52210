-- Grain: one row a lease and workload that ran on it: the lease's dollars in equal parts of its runs. workload is empty
-- where runs are of none (probes) or nothing ran; usd is null where the price is unknown.
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
