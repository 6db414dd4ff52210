-- Grain: one row per workload and provider of the current publications: its oldest price and newest
-- measurement.
select
    'Prices and measurements behind the recommendations' as title, workload, provider, min(price_as_of) as price_as_of,
    max(newest_measurement_at) as newest_measurement_at
from recommendations
group by workload, provider
order by workload, provider;
