-- Grain: one row per workload, kind, cluster, market and batch that was measured, in each
-- provider's newest refresh that held machines.
with newest as (
    select provider, refresh_id
    from spend
    qualify row_number() over (partition by provider order by started_at desc, refresh_id desc) = 1
)
select
    provider || ': setups measured' as title, workload, kind, cluster, market, batch_per_device, count(*) as runs,
    median(step_s) as step_s, any_value(reason_wanted) as reason_wanted
from raw_runs
join newest using (provider, refresh_id)
where status = 'measured' and kind in ('train', 'profile', 'probe')
group by all
order by title, workload, kind, cluster;
