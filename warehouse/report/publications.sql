-- Grain: one row per provider: its current publication, and the oldest price in it.
select provider, published_at, model_version, price_as_of
from raw_publications
left join (select provider, min(price_as_of) as price_as_of from recommendations group by provider) using (provider)
qualify row_number() over (partition by provider order by published_at desc, noted_order desc) = 1
order by provider;
