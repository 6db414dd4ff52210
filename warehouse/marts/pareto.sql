-- Grain: one row per provider, workload and setup of the current publication that no other setup
-- beats in both dollars and hours. Setups without a price are left out.
create or replace view pareto as
with setups as (
    select distinct on (
        provider, workload, cluster, cluster_offers, layout, batch_per_device, accumulation_steps, strategy, precision,
        switches
    )
        provider, workload, cluster, cluster_offers, layout, batch_per_device, accumulation_steps, strategy,
        precision, switches, global_batch, region, step_s, samples_per_s, hours, hours_p90, usd, usd_p90, price_as_of,
        publication_id, published_at, market, usd_machines, usd_storage, usd_other, interruption_risk,
        expected_interruptions
    from recommendations
    where cluster is not null and usd is not null and hours is not null
    order by rank
)
select setups.*
from setups
where not exists (
    select 1
    from setups as rival
    where rival.provider = setups.provider and rival.workload = setups.workload
        and rival.usd <= setups.usd and rival.hours <= setups.hours
        and (rival.usd < setups.usd or rival.hours < setups.hours)
)
order by provider, workload, usd, hours;

comment on view pareto is 'One row per provider, workload and setup that the current publication names and that no other named setup beats in both dollars and hours.';
