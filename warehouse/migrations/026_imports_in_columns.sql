-- Measurements made elsewhere have columns instead of a JSON body, which is ten times as fast to read where there are
-- millions, and tell themselves which import brought them first: only what other imports hold too is listed beside.
create table raw_imports_before as select * from raw_imports;
create table raw_import_rows_before as select * from raw_import_rows;
drop table raw_imports;
drop table raw_import_rows;

-- One row a measurement made elsewhere, as the first import that held it brought it.
create table raw_imports (
    row_digest varchar primary key,
    run_id varchar,
    import_id varchar not null,
    file_digest varchar not null,
    row_number bigint not null,
    provider varchar not null,
    workload varchar not null,
    cluster varchar not null,
    layout varchar,
    batch_per_device varchar not null,
    accumulation_steps bigint not null,
    strategy varchar not null,
    precision varchar not null,
    switches varchar not null,
    step_s double not null,
    sync_s double,
    gradient_bytes bigint,
    parameters bigint,
    flops_per_sample double,
    market varchar,
    zone varchar,
    source varchar,
    measured_at timestamp,
    loaded_at timestamp not null
);
insert into raw_imports by name
select
    row_digest,
    nullif(identity, row_digest) as run_id,
    coalesce((select min(import_id) from raw_import_rows_before as held where held.row_digest = raw.row_digest), file_digest)
        as import_id,
    file_digest,
    row_number,
    provider,
    json_extract_string(body, '$.workload') as workload,
    json_extract_string(body, '$.cluster') as cluster,
    json_extract_string(body, '$.layout') as layout,
    json_extract_string(body, '$.batch_per_device') as batch_per_device,
    json_extract_string(body, '$.accumulation_steps')::bigint as accumulation_steps,
    json_extract_string(body, '$.strategy') as strategy,
    json_extract_string(body, '$.precision') as precision,
    coalesce(json_extract_string(body, '$.switches'), 'none') as switches,
    json_extract_string(body, '$.step_s')::double as step_s,
    try_cast(json_extract_string(body, '$.sync_s') as double) as sync_s,
    try_cast(json_extract_string(body, '$.gradient_bytes') as bigint) as gradient_bytes,
    try_cast(json_extract_string(body, '$.parameters') as bigint) as parameters,
    try_cast(json_extract_string(body, '$.flops_per_sample') as double) as flops_per_sample,
    json_extract_string(body, '$.market') as market,
    json_extract_string(body, '$.zone') as zone,
    json_extract_string(body, '$.source') as source,
    try_cast(json_extract_string(body, '$.measured_at') as timestamp) as measured_at,
    loaded_at
from raw_imports_before as raw;

-- One row an import and measurement that it holds, where another import had brought that before.
create table raw_import_rows (
    import_id varchar not null,
    row_digest varchar not null,
    primary key (import_id, row_digest)
);
insert into raw_import_rows
select held.import_id, held.row_digest
from raw_import_rows_before as held
join raw_imports on raw_imports.row_digest = held.row_digest
where raw_imports.import_id <> held.import_id;

drop table raw_imports_before;
drop table raw_import_rows_before;
