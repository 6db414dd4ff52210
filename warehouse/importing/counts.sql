-- Grain: one row per title (such as 'precision') and name (such as 'bf16'), with the number of rows
-- of `staged` that have the name.
with clusters as (
    select unnest(list_distinct(regexp_extract_all(cluster, '(?:^|\+)\d+x([^+]+)', 1))) as name
    from staged
)
select title, name, count(*) as rows
from (
    select 'workload' as title, workload as name from staged
    union all
    select 'provider', provider from staged
    union all
    select 'instance type', name from clusters
    union all
    select 'precision', precision from staged
    union all
    select 'strategy', strategy from staged
    union all
    select 'switches', switches from staged
) as named
group by title, name
order by title, rows desc, name;
