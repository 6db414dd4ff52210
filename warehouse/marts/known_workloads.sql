-- Grain: one row per provider and workload with facts (parameters, FLOPs, ...) or with rows in the
-- mart `runs`. measured_rows counts runs by Srift, public_rows packaged step times, and
-- imported_rows all other imported step times. clusters and newest_measured_at (UTC) are of all
-- these rows.
create or replace view known_workloads as
with counted as (
    select
        provider,
        workload,
        (count(*) filter (where source like 'public: %'))::integer as public_rows,
        (count(*) filter (where run_id in (select run_id from raw_runs)))::integer as measured_rows,
        (count(*) - public_rows - measured_rows)::integer as imported_rows,
        list(distinct cluster) as clusters,
        max(measured_at) as newest_measured_at
    from stg_runs
    group by provider, workload
)
select
    facts.workload,
    facts.provider,
    facts.parameters,
    facts.gradient_bytes,
    facts.flops_per_sample,
    facts.samples,
    coalesce(counted.measured_rows, 0) as measured_rows,
    coalesce(counted.imported_rows, 0) as imported_rows,
    coalesce(counted.public_rows, 0) as public_rows,
    coalesce(counted.clusters, []) as clusters,
    counted.newest_measured_at
from workloads as facts
left join counted on counted.provider = facts.provider and counted.workload = facts.workload
where counted.workload is not null
    or coalesce(facts.parameters, facts.gradient_bytes, facts.flops_per_sample) is not null
order by facts.workload, facts.provider;
