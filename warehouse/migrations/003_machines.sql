-- What became of each machine that was held: how soon it was at work, how long it ran, whether the market took it.

-- One row a machine of a lease; a replacement is another one (number). asked_at is when the lease was asked for, as the
-- controller's clock says; startup_s is null where it never came to work.
create table raw_machines (
    lease_id varchar not null,
    node integer not null,
    number integer not null,
    provider varchar not null,
    instance_type varchar not null,
    market varchar not null,
    zone varchar not null,
    asked_at timestamp not null,
    startup_s double check (startup_s > 0),
    hours double not null check (hours >= 0),
    interrupted boolean not null,
    refresh_id varchar not null,
    primary key (lease_id, node, number)
);
