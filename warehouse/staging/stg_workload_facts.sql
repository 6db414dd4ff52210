-- Grain: one row per provider and workload with facts (parameters, FLOPs, ...) of an import that is
-- not forgotten. Each fact is the newest value that an import gave. Packaged facts (imports called
-- public-...) have the lowest priority, and are left out for workloads of stg_own_workloads.
create or replace view stg_workload_facts as
with counted as (
    select
        facts.* exclude (noted_order),
        {'own': not starts_with(import_id, 'public-'), 'noted': noted_order} as priority
    from raw_workload_facts as facts
    anti join (select import_id from stg_import_files where forgotten) using (import_id)
    left join stg_own_workloads as own using (provider, workload)
    where digest = '' and (own.workload is null or not starts_with(import_id, 'public-'))
)
select
    provider,
    workload,
    arg_max(parameters, priority) as parameters,
    arg_max(gradient_bytes, priority) as gradient_bytes,
    arg_max(flops_per_sample, priority) as flops_per_sample,
    arg_max(layers, priority) as layers,
    arg_max(hidden, priority) as hidden,
    arg_max(sequence, priority) as sequence,
    arg_max(samples, priority) as samples
from counted
group by provider, workload;
