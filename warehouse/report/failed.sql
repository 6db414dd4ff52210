-- Grain: one row per workload, cluster, status and reason of the runs without a measurement, in
-- each provider's newest refresh that held machines.
with newest as (
    select provider, refresh_id
    from spend
    qualify row_number() over (partition by provider order by started_at desc, refresh_id desc) = 1
)
select provider || ': runs without a measurement' as title, workload, cluster, status, reason, count(*) as runs
from failed_runs
join newest using (provider, refresh_id)
group by all
order by title, runs desc, workload, cluster;
