-- Grain: one row per provider and workload for which this installation has rows or a definition of
-- its own. Packaged step times (imports called public-...) do not count for such a workload,
-- because its name may mean another job.
-- Importing a copy of the packaged rows does not add their workloads to this view.
create or replace view stg_own_workloads as
select provider, workload
from stg_import_rows
where not in_public
union
select provider, workload
from stg_workloads
where digest <> 'imported';
