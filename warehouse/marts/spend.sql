-- Grain: one row per provider and refresh: the cost of its leases (the records of its launches),
-- and the number of its runs with and without a measurement. usd is null if a price is unknown.
create or replace view spend as
with leases as (
    select
        provider,
        refresh_id,
        count(*) as leases,
        min(started_at) as started_at,
        max(ended_at) as ended_at,
        strftime(max(ended_at), '%Y-%m') as month,
        case when bool_and(usd is not null) then sum(usd) end as usd
    from raw_leases
    group by provider, refresh_id
),
attempts as (
    select
        provider,
        refresh_id,
        count(*) filter (status = 'measured') as measured_runs,
        count(*) filter (status <> 'measured') as failed_runs
    from raw_runs
    where kind in ('train', 'profile', 'probe', 'launch')
    group by provider, refresh_id
)
select
    leases.provider,
    leases.refresh_id,
    leases.started_at,
    leases.ended_at,
    leases.month,
    leases.leases,
    coalesce(attempts.measured_runs, 0) as measured_runs,
    coalesce(attempts.failed_runs, 0) as failed_runs,
    leases.usd
from leases
left join attempts on attempts.provider = leases.provider and attempts.refresh_id = leases.refresh_id
order by leases.provider, leases.started_at;
