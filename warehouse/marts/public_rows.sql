-- Grain: one row a provider and workload of which public step times that came with the package count: how many.
create or replace view public_rows as
select provider, workload, count(*) as rows
from stg_imports
where is_public
group by provider, workload
order by provider, workload;
