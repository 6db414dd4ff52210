-- Grain: one row per measurement made elsewhere that belongs to at least one import that is not
-- forgotten. in_public is true if at least one of these imports is packaged (its id starts with
-- public-). is_public is true if all of them are packaged.
create or replace view stg_import_rows as
with forgotten as (
    select import_id
    from stg_import_files
    where forgotten
),
again as (
    select row_digest, bool_and(starts_with(import_id, 'public-')) as is_public,
        bool_or(starts_with(import_id, 'public-')) as in_public
    from raw_import_rows
    where import_id not in (select import_id from forgotten)
    group by row_digest
)
select
    raw.*,
    (starts_with(raw.import_id, 'public-') or forgotten.import_id is not null) and coalesce(again.is_public, true)
        as is_public,
    (starts_with(raw.import_id, 'public-') and forgotten.import_id is null) or coalesce(again.in_public, false)
        as in_public
from raw_imports as raw
left join forgotten on forgotten.import_id = raw.import_id
left join again on again.row_digest = raw.row_digest
where forgotten.import_id is null or again.row_digest is not null;
