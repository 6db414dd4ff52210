-- A run may also be slow because the fixed work beside it was: its machines were slow just then, not its code.
create table raw_alarms_before as select * from raw_alarms;
drop table raw_alarms;
create table raw_alarms (
    run_id varchar not null primary key,
    provider varchar not null,
    refresh_id varchar not null,
    judged_at timestamp not null,
    model_version varchar not null,
    workload varchar not null,
    cluster varchar not null,
    zone varchar not null,
    cause varchar not null check (cause in ('machine', 'link', 'input', 'compute', 'host', 'speed')),
    instance_type varchar not null,
    measured_s double not null check (measured_s > 0),
    predicted_s double not null check (predicted_s > 0),
    high_s double not null check (high_s > 0),
    detail varchar not null,
    measured_at timestamp not null
);
insert into raw_alarms by name select * from raw_alarms_before;
drop table raw_alarms_before;
