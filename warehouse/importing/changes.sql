-- Grain: one row that compares the stored rows and facts with the copies `rows_before` and
-- `facts_before`. The copies were made before an import, or before an import was forgotten
-- (undone). The facts of a provider and workload count as one.
-- rows_gone: the decrease in the number of rows that count.
-- facts_gone: number of facts that changed or no longer count.
-- facts_new, facts_changed, facts_same: numbers of new, changed and unchanged facts. Only facts of
-- $workloads are counted.
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
