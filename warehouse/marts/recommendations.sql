-- Grain: one row per provider, workload, goal, constraint and rank of the newest publication of the
-- provider. recommendation_history.sql describes the columns.
create or replace view recommendations as
with newest as (
    select provider, publication_id
    from raw_publications
    qualify row_number() over (partition by provider order by published_at desc, noted_order desc) = 1
)
select recommendation_history.*
from recommendation_history
join newest
    on newest.provider = recommendation_history.provider
    and newest.publication_id = recommendation_history.publication_id
order by provider, workload, goal, constraint_hours, constraint_usd, rank;

comment on view recommendations is 'One row per provider, workload, goal, constraint and rank of the newest publication of the provider.';
