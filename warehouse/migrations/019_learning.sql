-- One row a learning run attempted: losses of a given number of steps, and no seconds of any. Apart from raw_records,
-- whose rows tell of step times. The first one loaded stays.
create table raw_learning (
    run_id varchar primary key,
    kind varchar not null check (kind = 'learn'),
    status varchar not null check (status in ('measured', 'interrupted', 'refused', 'failed')),
    provider varchar not null,
    lease_id varchar not null,
    refresh_id varchar not null,
    body json not null,
    loaded_at timestamp not null
);
