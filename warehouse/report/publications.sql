-- Grain: one row per provider: its current publication.
select provider, published_at, model_version
from raw_publications
qualify row_number() over (partition by provider order by published_at desc, noted_order desc) = 1
order by provider;
