-- Grain: one row a provider and instance type: its newest definition.
create or replace view stg_instance_types as
select
    provider,
    name,
    digest,
    try_cast(json_extract_string(body, '$.devices') as integer) as devices,
    json_extract_string(body, '$.device') as device,
    try_cast(json_extract_string(body, '$.cores') as double) as cores,
    try_cast(json_extract_string(body, '$.memory_gib') as double) as memory_gib,
    try_cast(json_extract_string(body, '$.device_memory_gib') as double) as device_memory_gib,
    try_cast(json_extract_string(body, '$.bandwidth_gbps') as double) as bandwidth_gbps,
    try_cast(json_extract_string(body, '$.device_tflops') as double) as device_tflops,
    noted_at
from raw_instance_types
qualify row_number() over (partition by provider, name order by noted_order desc) = 1;
