-- Grain: one row per workload, provider and recommended setup with a price: its dollars and hours.
-- `judged` tells whether another setup is better in both dollars and hours. `first_for` lists the
-- goals whose first choice is this setup.
select
    format('{} ({})', workload, provider) as title,
    any_value(device) as device, cluster, market, batch_per_device, hours, any_value(hours_p90) as hours_p90, usd, any_value(usd_p90) as usd_p90,
    case when bool_or(pareto.best) then 'not beaten' else 'beaten' end as judged,
    string_agg(replace(goal, '_', ' '), ', ') filter (where rank = 1) as first_for
from recommendations
left join (
    select provider, workload, cluster, market, layout, batch_per_device, accumulation_steps, strategy, precision, switches,
        hours, true as best
    from pareto
) as pareto using (
    provider, workload, cluster, market, layout, batch_per_device, accumulation_steps, strategy, precision, switches, hours
)
where usd is not null and hours is not null
group by provider, workload, cluster, market, layout, batch_per_device, accumulation_steps, strategy, precision, switches,
    hours, usd
order by title, hours;
