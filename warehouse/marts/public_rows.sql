-- Grain: one row per provider and workload: the number of packaged step times (the public data that
-- ships with Srift) that count.
create or replace view public_rows as
select provider, workload, count(*) as rows
from stg_imports
where is_public
group by provider, workload
order by provider, workload;
