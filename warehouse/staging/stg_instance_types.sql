-- Grain: one row per provider and instance type: its newest definition.
create or replace view stg_instance_types as
select * exclude (noted_order)
from raw_instance_types
qualify row_number() over (partition by provider, name order by noted_order desc) = 1;
