-- Grain: one row per provider and workload with a definition: the newest definition.
create or replace view stg_workloads as
select * exclude (noted_order, import_id)
from raw_workload_facts
where digest <> ''
qualify row_number() over (partition by provider, workload order by noted_order desc) = 1;
