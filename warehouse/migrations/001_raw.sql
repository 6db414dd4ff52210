-- What came in, as it came in. Times are UTC. Nothing here is ever updated: a later fact is a later row.

create sequence noted_order;

-- One row a run attempted: a measurement, an interruption, a refusal or a failure; kind launch is a cluster that was
-- refused as a whole. The first one loaded stays.
create table raw_records (
    run_id varchar primary key,
    kind varchar not null check (kind in ('train', 'profile', 'probe', 'launch')),
    status varchar not null check (status in ('measured', 'interrupted', 'refused', 'failed')),
    provider varchar not null,
    lease_id varchar not null,
    refresh_id varchar not null,
    body json not null,
    loaded_at timestamp not null
);

-- One row a measurement made elsewhere.
create table raw_imports (
    identity varchar primary key,
    file_digest varchar not null,
    row_number integer not null,
    provider varchar not null,
    body json not null,
    loaded_at timestamp not null
);

-- One row each time a workload's definition changed; an empty digest marks facts that came with an import.
create table raw_workload_facts (
    provider varchar not null,
    workload varchar not null,
    digest varchar not null,
    body json not null,
    noted_at timestamp not null,
    noted_order bigint not null default nextval('noted_order')
);

-- One row each time an instance type's definition changed.
create table raw_instance_types (
    provider varchar not null,
    name varchar not null,
    digest varchar not null,
    body json not null,
    noted_at timestamp not null,
    noted_order bigint not null default nextval('noted_order')
);

-- One row a snapshot and offer. A missing price is null, never 0.
create table raw_offers (
    snapshot_id varchar not null,
    provider varchar not null,
    instance_type varchar not null,
    market varchar not null,
    zone varchar not null,
    region varchar not null,
    usd_per_hour double check (usd_per_hour > 0),
    interruptions_per_hour double,
    price_as_of timestamp not null,
    as_of timestamp not null,
    noted_order bigint not null default nextval('noted_order'),
    primary key (snapshot_id, provider, instance_type, market, region, zone)
);

-- One row a cluster that was held.
create table raw_leases (
    lease_id varchar primary key,
    provider varchar not null,
    cluster varchar not null,
    market varchar not null,
    started_at timestamp not null,
    ended_at timestamp not null,
    usd double,
    refresh_id varchar not null,
    outcome varchar not null
);

-- One row a challenger: promoted to champion or refused, and why.
create table raw_models (
    provider varchar not null,
    version varchar not null,
    trained_at timestamp not null,
    training_digest varchar not null,
    promoted boolean not null,
    reason varchar not null,
    code_commit varchar not null,
    refresh_id varchar not null,
    primary key (provider, version)
);

-- One row a line of a challenger's scoreboard.
create table raw_scores (
    provider varchar not null,
    version varchar not null,
    split varchar not null,
    group_name varchar not null,
    rows bigint not null,
    mean_error double,
    median_error double,
    p90_error double,
    coverage_90 double,
    median_width double,
    primary key (provider, version, split, group_name)
);

-- One row a phase of a refresh: seconds that are not steps of a benchmark.
create table raw_timings (
    refresh_id varchar not null,
    phase varchar not null,
    seconds double not null,
    primary key (refresh_id, phase)
);

-- One row a publication of one provider.
create table raw_publications (
    publication_id varchar primary key,
    published_at timestamp not null,
    provider varchar not null,
    refresh_id varchar not null,
    model_version varchar not null,
    noted_order bigint not null default nextval('noted_order')
);

-- One row a publication, provider, workload, goal, constraint and rank. What must hold of them stands in checks/.
create table raw_recommendations (
    publication_id varchar not null,
    published_at timestamp not null,
    provider varchar not null,
    workload varchar not null,
    samples bigint,
    global_batch bigint,
    goal varchar not null,
    constraint_hours double,
    constraint_usd double,
    p_required double,
    rank integer not null,
    status varchar not null,
    cluster varchar,
    cluster_offers struct(instance_type varchar, count integer, market varchar, zone varchar, usd_per_hour double)[],
    layout varchar,
    batch_per_device varchar,
    accumulation_steps integer,
    strategy varchar,
    precision varchar,
    region varchar,
    step_s double,
    step_low_s double,
    step_high_s double,
    samples_per_s double,
    hours double,
    hours_p90 double,
    usd double,
    usd_p90 double,
    usd_per_million_samples double,
    p_meets_constraint double,
    p_best double,
    bottleneck varchar,
    measured_runs integer,
    reason varchar,
    price_as_of timestamp,
    newest_measurement_at timestamp,
    model_version varchar
);
