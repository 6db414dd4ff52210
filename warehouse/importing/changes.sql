-- Grain: one row. rows_gone and facts_gone count what `rows_before` and `facts_before` have and
-- what no longer counts. facts_new, facts_changed and facts_same count the facts of $workloads.
select
    (select count(*) from rows_before) - (select count(*) from stg_imports) as rows_gone,
    count(*) filter (before.provider is not null and now is distinct from before) as facts_gone,
    count(*) filter (before.provider is null and list_contains($workloads, workload)) as facts_new,
    count(*) filter (
        before.provider is not null and now is distinct from before and list_contains($workloads, workload)
    ) as facts_changed,
    count(*) filter (now = before and list_contains($workloads, workload)) as facts_same
from facts_before as before
full join stg_workload_facts as now using (provider, workload);
