-- Grain: one row per provider and workload that was defined, measured or imported. A fact comes
-- from the first of these sources that has it: the facts file of an import, the definition, runs of
-- the current definition, imported rows, and runs of the same definition on other providers (facts
-- do not depend on machines). For samples, the definition comes first.
-- digest is 'imported' if rows or facts were imported and the workload has no definition.
-- divided_weights, divided_inputs and divided_pairs count the elements that tensor parallelism
-- divides: weights, inputs of a sample, and activations of a sample that enter and leave pairs of
-- layers.
create or replace view workloads as
with measured as (
    select
        provider,
        workload,
        max(parameters) as parameters,
        max(gradient_bytes) as gradient_bytes,
        max(flops_per_sample) as flops_per_sample,
        max(checkpoint_bytes) as checkpoint_bytes,
        max(divided_weights) as divided_weights,
        max(divided_inputs) as divided_inputs,
        max(divided_pairs) as divided_pairs
    from stg_current
    where workload_same and machine_same and kind <> 'probe'
    group by provider, workload
),
imported as (
    select
        provider,
        workload,
        max(parameters) as parameters,
        max(gradient_bytes) as gradient_bytes,
        max(flops_per_sample) as flops_per_sample
    from stg_imports
    group by provider, workload
),
elsewhere as (
    select
        stg_workloads.workload,
        stg_workloads.digest,
        max(measured.parameters) as parameters,
        max(measured.gradient_bytes) as gradient_bytes,
        max(measured.flops_per_sample) as flops_per_sample
    from measured
    join stg_workloads using (provider, workload)
    where stg_workloads.digest <> 'imported'
    group by stg_workloads.workload, stg_workloads.digest
),
known as (
    select provider, workload from stg_workloads
    union
    select provider, workload from stg_workload_facts
    union
    select provider, workload from imported
)
select
    known.provider,
    known.workload,
    coalesce(
        defined.digest, case when imported.workload is not null or facts.workload is not null then 'imported' end
    ) as digest,
    coalesce(facts.parameters, defined.parameters, measured.parameters, imported.parameters, elsewhere.parameters) as parameters,
    coalesce(facts.gradient_bytes, defined.gradient_bytes, measured.gradient_bytes, imported.gradient_bytes, elsewhere.gradient_bytes)
        as gradient_bytes,
    coalesce(facts.flops_per_sample, defined.flops_per_sample, measured.flops_per_sample, imported.flops_per_sample, elsewhere.flops_per_sample)
        as flops_per_sample,
    coalesce(facts.layers, defined.layers) as layers,
    coalesce(facts.hidden, defined.hidden) as hidden,
    coalesce(facts.sequence, defined.sequence) as sequence,
    coalesce(defined.samples, facts.samples) as samples,
    measured.checkpoint_bytes,
    measured.divided_weights,
    measured.divided_inputs,
    measured.divided_pairs
from known
left join stg_workloads as defined on defined.provider = known.provider and defined.workload = known.workload
left join stg_workload_facts as facts on facts.provider = known.provider and facts.workload = known.workload
left join measured on measured.provider = known.provider and measured.workload = known.workload
left join elsewhere on elsewhere.workload = known.workload and elsewhere.digest = defined.digest
left join imported on imported.provider = known.provider and imported.workload = known.workload
order by known.provider, known.workload;
