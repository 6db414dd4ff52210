-- Grain: one row per provider and workload: its dollars, in each provider's newest refresh that
-- held machines.
with newest as (
    select provider, refresh_id
    from spend
    qualify row_number() over (partition by provider order by started_at desc, refresh_id desc) = 1
)
select
    provider || ': dollars by workload' as title, workload, sum(runs)::integer as runs, count(*) as leases,
    case when bool_and(usd is not null) then sum(usd) end as usd
from lease_spend
join newest using (provider, refresh_id)
group by provider, workload
order by title, usd desc nulls last, workload;
