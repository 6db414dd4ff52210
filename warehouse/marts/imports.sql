-- Grain: one row per import, including forgotten imports: its files, when it was last made, and the
-- numbers of its rows and facts. Times are UTC.
create or replace view imports as
with held as (
    select import_id, provider, workload
    from raw_imports
    union all
    select again.import_id, raw_imports.provider, raw_imports.workload
    from raw_import_rows as again
    join raw_imports on raw_imports.row_digest = again.row_digest
),
measured as (
    select
        import_id,
        count(*) as measurements,
        list_sort(list(distinct provider)) as providers,
        list_sort(list(distinct workload)) as workloads
    from held
    group by import_id
),
described as (
    select
        import_id,
        count(distinct workload) as facts,
        list_sort(list(distinct provider)) as providers,
        list_sort(list(distinct workload)) as workloads
    from raw_workload_facts
    where digest = ''
    group by import_id
)
select
    files.import_id,
    files.file,
    files.facts_file,
    files.imported_at,
    files.forgotten,
    coalesce(measured.measurements, 0) as rows,
    coalesce(described.facts, 0) as facts,
    list_sort(list_distinct(list_concat(measured.providers, described.providers))) as providers,
    list_sort(list_distinct(list_concat(measured.workloads, described.workloads))) as workloads
from stg_import_files as files
left join measured on measured.import_id = files.import_id
left join described on described.import_id = files.import_id
order by files.imported_at, files.import_id;
