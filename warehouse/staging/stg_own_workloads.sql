-- Grain: one row per provider and workload of which this installation has its own rows or a
-- definition. Packaged step times (imports called public-...) do not count for such a workload,
-- since its name may mean another job. An import of the packaged rows does not make a workload an
-- own workload.
create or replace view stg_own_workloads as
select provider, workload
from stg_import_rows
where not in_public
union
select provider, workload
from stg_workloads
where digest <> 'imported';
