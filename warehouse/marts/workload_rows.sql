-- Grain: one row a provider, workload and cluster that was measured under today's definitions: how many rows were
-- measured here, how many came with the package (public) and how many others were imported, how many of them are predicted from (any strategy known to models, in fp32, tf32, bf16 or fp16), and the newest in UTC.
create or replace view workload_rows as
select
    provider,
    workload,
    cluster,
    count(*) filter (where run_id in (select run_id from raw_records)) as measured_rows,
    count(*) filter (where source like 'public: %') as public_rows,
    count(*) filter (where run_id not in (select run_id from raw_records)) - public_rows as imported_rows,
    count(*) filter (where strategy in ('ddp', 'fsdp', 'zero2', 'ddp-fp16', 'ddp-powersgd', 'ddp-mstopk', 'adasum', 'adasum-delta', 'tensor-1d', 'tensor-2d', 'tensor-2.5d', 'zero1', 'ps-1', 'ps-2', 'ps-4', 'tables') and precision in ('fp32', 'tf32', 'bf16', 'fp16')) as predicted_from,
    max(measured_at) as newest_measured_at
from runs
group by provider, workload, cluster
order by provider, workload, cluster;
