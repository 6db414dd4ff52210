-- Grain: one row per provider and instance type: the newest definition. Memory is in GiB, bandwidth
-- in Gbit/s, and device_tflops in TFLOP/s of one device.
create or replace view instance_types as
select
    provider, name, devices, device, cores, memory_gib, device_memory_gib, bandwidth_gbps, device_tflops, digest
from stg_instance_types
order by provider, name;
