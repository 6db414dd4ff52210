-- Grain: one row a run measured here: whether its workload and all its instance types are still defined as they were,
-- and whether its machines count: they had their types' devices (the unknown counts), today's line of torch
-- (major.minor: a patch, or another build of it, changes no step time so much that all is bought anew) and, locally, are today's
-- machine. Today's are those of the provider's newest measurement on the right devices.
create or replace view stg_current as
with instances as (
    select run_id, provider, unnest(instance_types) as name, unnest(instance_digests) as digest
    from stg_records
    where status = 'measured'
),
same_instances as (
    select instances.run_id, bool_and(coalesce(stg_instance_types.digest = instances.digest, false)) as instances_same
    from instances
    left join stg_instance_types
        on stg_instance_types.provider = instances.provider and stg_instance_types.name = instances.name
    group by instances.run_id
),
newest as (
    select provider, torch_line, fingerprint
    from stg_records
    where status = 'measured' and wrong_device is null
    qualify row_number() over (partition by provider order by measured_at desc, run_id desc) = 1
),
judged as (
    select
        stg_records.*,
        stg_records.kind = 'probe' or coalesce(stg_workloads.digest = stg_records.workload_digest, false)
            as workload_same,
        coalesce(same_instances.instances_same, false) as instances_same,
        stg_records.torch_line is not distinct from newest.torch_line
            and (stg_records.provider <> 'local' or stg_records.fingerprint is not distinct from newest.fingerprint)
            as newest_same
    from stg_records
    left join same_instances on same_instances.run_id = stg_records.run_id
    left join newest on newest.provider = stg_records.provider
    left join stg_workloads
        on stg_workloads.provider = stg_records.provider and stg_workloads.workload = stg_records.workload
    where stg_records.status = 'measured'
)
select *, newest_same and wrong_device is null as machine_same
from judged;
