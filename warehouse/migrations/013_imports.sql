-- An import can be forgotten: its rows and facts stay as they came in and no longer count. A row counts while some import
-- that holds it does, and one run_id may come with other values, so that what is stored has a digest of its own.
create table raw_imports_before as select * from raw_imports;
drop table raw_imports;

-- One row a measurement made elsewhere, as the first import that held it brought it.
create table raw_imports (
    row_digest varchar primary key,
    identity varchar not null,
    file_digest varchar not null,
    row_number integer not null,
    provider varchar not null,
    body json not null,
    loaded_at timestamp not null
);
insert into raw_imports by name select *, identity as row_digest from raw_imports_before;
drop table raw_imports_before;

-- One row an import and measurement that it holds.
create table raw_import_rows (
    import_id varchar not null,
    row_digest varchar not null,
    primary key (import_id, row_digest)
);
insert into raw_import_rows select file_digest, row_digest from raw_imports;

-- One row each time an import was made or forgotten: the newest one tells whether it counts. file is that of the rows.
create table raw_import_events (
    import_id varchar not null,
    event varchar not null check (event in ('imported', 'forgotten')),
    file varchar,
    facts_file varchar,
    noted_at timestamp not null,
    noted_order bigint not null default nextval('noted_order')
);

-- The import that facts (digest '') came with: in older homes that of the rows loaded at the same moment.
alter table raw_workload_facts add column import_id varchar;
update raw_workload_facts
set import_id = coalesce(
    (select min(file_digest) from raw_imports where loaded_at = noted_at), substr(md5(noted_at::varchar), 1, 16)
)
where digest = '';

insert into raw_import_events (import_id, event, noted_at)
select import_id, 'imported', min(moment)
from (
    select file_digest as import_id, loaded_at as moment from raw_imports
    union all
    select import_id, noted_at from raw_workload_facts where digest = ''
)
group by import_id
order by min(moment), import_id;
