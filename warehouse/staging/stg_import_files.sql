-- Grain: one row per import: its files, the time it was last made, and whether it has been
-- forgotten since.
create or replace view stg_import_files as
select
    import_id,
    arg_max(file, noted_order) filter (where event = 'imported') as file,
    arg_max(facts_file, noted_order) filter (where event = 'imported') as facts_file,
    max(noted_at) filter (where event = 'imported') as imported_at,
    arg_max(event, noted_order) = 'forgotten' as forgotten
from raw_import_events
group by import_id;
