-- Grain: one row a provider and workload of which somebody here has rows of his own, or a definition of its code. Public
-- step times that came with the package (imports called public-...) do not count beside those, since the name may mean
-- another thing. An import of the same rows as the public ones is none of one's own.
create or replace view stg_own_workloads as
select provider, workload
from stg_import_rows
where not in_public
union
select provider, workload
from stg_workloads
where digest <> 'imported';
