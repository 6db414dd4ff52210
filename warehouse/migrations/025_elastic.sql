-- One row an elastic run attempted: its restarts, checkpoints and lost machines, and no step time of a steady setup. Apart
-- from raw_records, whose rows tell of step times. The first one loaded stays.
create table raw_elastic (
    run_id varchar primary key,
    kind varchar not null check (kind = 'elastic'),
    status varchar not null check (status in ('measured', 'interrupted', 'refused', 'failed')),
    provider varchar not null,
    lease_id varchar not null,
    refresh_id varchar not null,
    body json not null,
    loaded_at timestamp not null
);
