-- Grain: one row per provider, instance type, market and zone in the newest price snapshot of the
-- provider. An unknown price is null.
create or replace view offers as
with newest as (
    select provider, snapshot_id
    from raw_offers
    qualify row_number() over (partition by provider order by as_of desc, noted_order desc) = 1
)
select
    raw_offers.provider,
    raw_offers.instance_type,
    raw_offers.market,
    raw_offers.zone,
    raw_offers.region,
    raw_offers.usd_per_hour,
    raw_offers.interruptions_per_hour,
    raw_offers.price_as_of,
    raw_offers.interruption_source
from raw_offers
join newest on newest.provider = raw_offers.provider and newest.snapshot_id = raw_offers.snapshot_id
order by raw_offers.provider, raw_offers.instance_type, raw_offers.market, raw_offers.zone;
