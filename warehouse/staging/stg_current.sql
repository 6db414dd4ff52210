-- Grain: one row per measured train, profile or probe run, with its torch version (major.minor) and
-- four flags.
-- workload_same: the workload's definition is unchanged. instances_same: the definitions of the
-- instance types are unchanged. newest_same: the run has the torch version of the provider's newest
-- run on the right devices. A local run must also have the machine fingerprint of this newest run.
-- machine_same: newest_same is true, and the run used the devices of its instance types.
create or replace view stg_current as
with measured as (
    select
        * replace (
            coalesce(accumulation_steps, 1) as accumulation_steps,
            coalesce(strategy, 'ddp') as strategy,
            coalesce(precision, 'fp32') as precision,
            coalesce(switches, 'none') as switches
        ),
        coalesce(nullif(regexp_extract(torch_version, '^\d+\.\d+'), ''), torch_version) as torch_line
    from raw_runs
    where status = 'measured' and kind in ('train', 'profile', 'probe')
),
instances as (
    select run_id, provider, unnest(instance_types) as name, unnest(instance_digests) as digest
    from measured
),
same_instances as (
    select run_id, bool_and(coalesce(types.digest = instances.digest, false)) as instances_same
    from instances
    left join stg_instance_types as types using (provider, name)
    group by run_id
),
newest as (
    select provider, torch_line, fingerprint
    from measured
    where wrong_device is null
    qualify row_number() over (partition by provider order by measured_at desc, run_id desc) = 1
)
select
    measured.*,
    kind = 'probe' or coalesce(defined.digest = measured.workload_digest, false) as workload_same,
    coalesce(same_instances.instances_same, false) as instances_same,
    measured.torch_line is not distinct from newest.torch_line
        and (measured.provider <> 'local' or measured.fingerprint is not distinct from newest.fingerprint) as newest_same,
    newest_same and wrong_device is null as machine_same
from measured
left join same_instances using (run_id)
left join newest on newest.provider = measured.provider
left join stg_workloads as defined on defined.provider = measured.provider and defined.workload = measured.workload;
