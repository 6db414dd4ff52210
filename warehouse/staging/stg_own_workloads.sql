-- Grain: one row a provider and workload of which somebody here has rows of his own, or a definition of its code. Public
-- step times that came with the package (imports called public-...) do not count beside those, since the name may mean
-- another thing. An import of the same rows as the public ones is none of one's own.
create or replace view stg_own_workloads as
with held as (
    select row_digest, bool_or(starts_with(import_id, 'public-')) as is_public
    from raw_import_rows
    where import_id not in (select import_id from stg_import_files where forgotten)
    group by row_digest
)
select provider, json_extract_string(body, '$.workload') as workload
from raw_imports
join held on held.row_digest = raw_imports.row_digest
where not held.is_public
union
select provider, workload
from stg_workloads
where digest <> 'imported';
