-- One row a run that was slower than the interval that the champion then in force, which had not learned from it, gave.
create table raw_alarms (
    run_id varchar not null primary key,
    provider varchar not null,
    refresh_id varchar not null,
    judged_at timestamp not null,
    model_version varchar not null,
    workload varchar not null,
    cluster varchar not null,
    zone varchar not null,
    cause varchar not null check (cause in ('machine', 'link', 'input', 'compute')),
    instance_type varchar not null,
    measured_s double not null check (measured_s > 0),
    predicted_s double not null check (predicted_s > 0),
    high_s double not null check (high_s > 0),
    detail varchar not null,
    measured_at timestamp not null
);
