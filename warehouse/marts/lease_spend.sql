-- Grain: one row a lease and workload that ran on it: the lease's dollars in equal parts of its runs, those that learn
-- and elastic ones too.
-- workload is empty where runs are of none (probes) or nothing ran; usd is null where the price is unknown.
create or replace view lease_spend as
with runs as (
    select
        provider,
        lease_id,
        coalesce(json_extract_string(body, '$.setup.workload'), '') as workload,
        count(*) as runs
    from (
        select provider, lease_id, body from raw_records where kind <> 'launch'
        union all
        select provider, lease_id, body from raw_learning
        union all
        select provider, lease_id, body from raw_elastic
    )
    group by all
),
parts as (
    select *, runs / sum(runs) over (partition by provider, lease_id) as part
    from runs
)
select
    raw_leases.provider,
    raw_leases.lease_id,
    raw_leases.refresh_id,
    raw_leases.cluster,
    raw_leases.market,
    raw_leases.started_at,
    raw_leases.ended_at,
    raw_leases.outcome,
    coalesce(parts.workload, '') as workload,
    coalesce(parts.runs, 0) as runs,
    raw_leases.usd * coalesce(parts.part, 1) as usd
from raw_leases
left join parts on parts.provider = raw_leases.provider and parts.lease_id = raw_leases.lease_id
order by raw_leases.provider, raw_leases.started_at, raw_leases.lease_id, workload;
