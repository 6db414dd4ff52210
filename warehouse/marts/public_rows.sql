-- Grain: one row per provider and workload with step times of the package (public) that count: the
-- number of these rows.
create or replace view public_rows as
select provider, workload, count(*) as rows
from stg_imports
where is_public
group by provider, workload
order by provider, workload;
