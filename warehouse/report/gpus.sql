-- Grain: one row per workload, provider and kind of device, if several kinds are compared: the best
-- cluster of the kind. The cluster is the best for a goal with a deadline or budget. Without such a
-- goal, it is the best for another goal.
with goals as (
    select distinct on (provider, workload) provider, workload, goal, constraint_hours, constraint_usd
    from recommendations
    order by
        provider, workload, constraint_hours is null and constraint_usd is null, goal, constraint_hours,
        constraint_usd
),

compared as (
    select distinct on (provider, workload, device)
        concat(
            format('{} ({}), {}', workload, provider, replace(goal, '_', ' ')),
            ' ' || goals.constraint_hours || ' h', ' $' || goals.constraint_usd
        ) as title,
        device, cluster, market, concat_ws(' ', precision, strategy, nullif(switches, 'none')) as mode,
        tokens_per_s_per_gpu, mfu, step_s, hours, usd, p_meets_constraint, measured_runs
    from recommendations
    inner join goals using (provider, workload, goal)
    where not contains(device, '+')
        and goals.constraint_hours is not distinct from recommendations.constraint_hours
        and goals.constraint_usd is not distinct from recommendations.constraint_usd
    order by provider, workload, device, rank
)

select *
from compared
qualify count(*) over (partition by title) > 1
order by title, usd;
