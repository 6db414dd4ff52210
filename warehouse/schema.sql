-- The raw tables. Times are UTC. Rows are never updated: a new fact is a new row with a higher
-- noted_order. append.py defines the keys, because DuckLake supports no keys, checks or sequences.

-- One row: the digest of this file, and when the tables were created.
create table srift_schema (digest varchar not null, made_at timestamp not null);

-- Grain: one row per run that Srift attempted. kind is train, learn, elastic, profile, probe or
-- launch (the whole cluster was refused). status is measured, interrupted, refused or failed. If a
-- run_id is appended twice, the first row stays. tasks/node/record.py documents the columns.
create table raw_runs (
    run_id varchar not null,
    kind varchar not null,
    status varchar not null,
    provider varchar not null,
    lease_id varchar not null,
    refresh_id varchar not null,
    reason varchar not null,
    cause varchar not null,
    told_by varchar not null,
    workload varchar not null,
    workload_digest varchar not null,
    cluster varchar,
    layout varchar,
    batch_per_device varchar,
    accumulation_steps integer,
    strategy varchar,
    precision varchar,
    switches varchar,
    market varchar,
    zone varchar,
    region varchar,
    usd_per_hour double,
    instance_types varchar[],
    instance_digests varchar[],
    reason_wanted varchar,
    code_commit varchar,
    image_id varchar,
    fingerprint varchar,
    torch_version varchar,
    device_names varchar[],
    device_threads integer[],
    wrong_device varchar,
    nodes integer[],
    taken_share double,
    reference_s double[],
    reference_spread double,
    reference_blocks integer,
    parameters bigint,
    gradient_bytes bigint,
    flops_per_sample double,
    step_s double,
    step_spread double,
    sync_s double,
    input_s double,
    rank_compute_s double[],
    rank_order integer[],
    build_s double,
    warmup_s double,
    checkpoint_s double,
    checkpoint_bytes bigint,
    loader_workers integer,
    load_s double,
    load_wait_s double,
    divided_weights double,
    divided_inputs double,
    divided_pairs double,
    rows struct(
        batch integer, forward_s double, backward_s double, optimizer_s double, input_s double, peak_bytes double,
        bytes bigint, seconds double
    )[],
    buckets struct(bytes bigint, ready_fraction double)[],
    seed bigint,
    losses double[],
    steps_a_window integer,
    diverged boolean,
    steps integer,
    checkpoint_every integer,
    first_loss double,
    last_loss double,
    lost_unix double[],
    starts struct(
        nodes integer[], batches integer[], micro_steps integer, step integer, lost_steps integer, last_unix double,
        began_unix double, restore_s double, restore_bytes bigint
    )[],
    checkpoints struct(step integer, bytes bigint, seconds double, ended_unix double)[],
    measured_at timestamp not null,
    loaded_at timestamp not null
);

-- Grain: one row per measurement made elsewhere, with the values of the first import that had it.
create table raw_imports (
    row_digest varchar not null,
    run_id varchar,
    import_id varchar not null,
    file_digest varchar not null,
    row_number bigint not null,
    provider varchar not null,
    workload varchar not null,
    cluster varchar not null,
    layout varchar,
    batch_per_device varchar not null,
    accumulation_steps integer not null,
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

-- Grain: one row per import and measurement, if an earlier import had already loaded it.
create table raw_import_rows (import_id varchar not null, row_digest varchar not null);

-- Grain: one row per event of an import, 'imported' or 'forgotten'. The newest row decides whether
-- the import counts.
create table raw_import_events (
    import_id varchar not null,
    event varchar not null,
    file varchar,
    facts_file varchar,
    noted_at timestamp not null,
    noted_order bigint not null
);

-- Grain: one row per change of a workload's definition, or per import of facts about a workload. A
-- definition has a digest. Imported facts have an import_id and an empty digest.
create table raw_workload_facts (
    provider varchar not null,
    workload varchar not null,
    digest varchar not null,
    import_id varchar,
    parameters bigint,
    gradient_bytes bigint,
    flops_per_sample double,
    layers bigint,
    hidden bigint,
    sequence bigint,
    samples bigint,
    noted_at timestamp not null,
    noted_order bigint not null
);

-- Grain: one row per change of an instance type's definition. Units are GiB, Gbit/s, and TFLOP/s of
-- one device.
create table raw_instance_types (
    provider varchar not null,
    name varchar not null,
    digest varchar not null,
    devices integer,
    device varchar,
    cores double,
    memory_gib double,
    device_memory_gib double,
    bandwidth_gbps double,
    device_tflops double,
    noted_at timestamp not null,
    noted_order bigint not null
);

-- Grain: one row per snapshot and offer. A missing price is null, never 0.
create table raw_offers (
    snapshot_id varchar not null,
    provider varchar not null,
    instance_type varchar not null,
    market varchar not null,
    zone varchar not null,
    region varchar not null,
    usd_per_hour double,
    interruptions_per_hour double,
    interruption_source varchar,
    price_as_of timestamp not null,
    as_of timestamp not null,
    noted_order bigint not null
);

-- Grain: one row per cluster that was held.
create table raw_leases (
    lease_id varchar not null,
    provider varchar not null,
    cluster varchar not null,
    market varchar not null,
    started_at timestamp not null,
    ended_at timestamp not null,
    usd double,
    refresh_id varchar not null,
    outcome varchar not null
);

-- Grain: one row per launch on EC2 of a workload with data. bytes and files are what each machine
-- downloads, region is the bucket's.
create table raw_downloads (
    workload varchar not null,
    workload_digest varchar not null,
    region varchar not null,
    bytes bigint not null,
    files bigint not null,
    planned_at timestamp not null
);

-- Grain: one row per machine of a lease; a replacement has the next number. asked_at is the time of
-- the request by the controller's clock. startup_s is null if the machine was never ready for work.
create table raw_machines (
    lease_id varchar not null,
    node integer not null,
    number integer not null,
    provider varchar not null,
    instance_type varchar not null,
    market varchar not null,
    zone varchar not null,
    asked_at timestamp not null,
    startup_s double,
    hours double not null,
    interrupted boolean not null,
    refresh_id varchar not null
);

-- Grain: one row per event of a campaign (the launches of one refresh) in a shared warehouse.
-- 'claimed' is stored before the first launch: the campaign may cost up to usd, and nothing after
-- may_cost_until. 'settled' is stored when the campaign is over and its home holds no machine.
-- place names that home, which is a SRIFT_HOME folder.
create table raw_claims (
    event varchar not null,
    refresh_id varchar not null,
    provider varchar not null,
    place varchar not null,
    usd double not null,
    noted_at timestamp not null,
    may_cost_until timestamp not null,
    noted_order bigint not null
);

-- Grain: one row per registered challenger (a newly fitted model). A new registry counts versions
-- from 1 again; refresh_id then differs.
create table raw_models (
    provider varchar not null,
    version varchar not null,
    trained_at timestamp not null,
    training_digest varchar not null,
    promoted boolean not null,
    reason varchar not null,
    code_commit varchar not null,
    refresh_id varchar not null
);

-- Grain: one row per line of a challenger's scoreboard.
create table raw_scores (
    provider varchar not null,
    version varchar not null,
    refresh_id varchar not null,
    split varchar not null,
    "group" varchar not null,
    rows bigint not null,
    mean_error double,
    median_error double,
    p90_error double,
    coverage_90 double,
    median_width double
);

-- Grain: one row per publication of one provider.
create table raw_publications (
    publication_id varchar not null,
    published_at timestamp not null,
    provider varchar not null,
    refresh_id varchar not null,
    model_version varchar not null,
    noted_order bigint not null
);

-- Grain: one row per publication, provider, workload, goal, constraint and rank. checks/ has the
-- rules for these rows; marts/recommendation_history.sql has the units.
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
    model_version varchar,
    market varchar,
    usd_machines double,
    usd_storage double,
    usd_other double,
    interruption_risk double,
    expected_interruptions double,
    interruption_source varchar,
    placement_score integer,
    switches varchar,
    compute_s double,
    communication_s double,
    exposed_communication_s double,
    input_s double,
    tokens_per_s double,
    tokens_per_s_per_gpu double,
    mfu double,
    memory_gib double,
    memory_available_gib double,
    device varchar
);

-- Grain: one row per comparison of a published first choice with runs measured since publication.
-- promise_id is a digest of publication, workload, goal and constraint; evidence is a digest of the
-- runs.
create table raw_ledger (
    promise_id varchar not null,
    evidence varchar not null,
    evidence_runs integer not null,
    provider varchar not null,
    refresh_id varchar not null,
    judged_at timestamp not null,
    publication_id varchar not null,
    published_at timestamp not null,
    model_version varchar,
    workload varchar not null,
    goal varchar not null,
    constraint_hours double,
    constraint_usd double,
    p_required double,
    cluster varchar not null,
    market varchar,
    layout varchar,
    batch_per_device varchar,
    accumulation_steps integer,
    strategy varchar,
    precision varchar,
    switches varchar,
    promised_step_s double,
    promised_step_low_s double,
    promised_step_high_s double,
    promised_hours double,
    promised_usd double,
    promised_p_meets double,
    runs integer not null,
    measured_step_s double,
    measured_hours double,
    measured_usd double,
    measured_p_meets double,
    within_interval boolean,
    met_constraint boolean,
    rivals_named integer not null,
    rivals_measured integer not null,
    best_rival_rank integer,
    best_rival_cluster varchar,
    best_rival_market varchar,
    best_rival_batch_per_device varchar,
    best_rival_accumulation_steps integer,
    best_rival_step_s double,
    best_rival_hours double,
    best_rival_usd double,
    verdict varchar not null,
    regret double,
    first_measured_at timestamp,
    newest_measured_at timestamp,
    noted_order bigint not null
);

-- Grain: one row per refresh and group of recent runs that the champion at that time had not
-- learned from. scope is always 'type': the group is an instance type in a zone ('' if unknown).
create table raw_drift (
    refresh_id varchar not null,
    provider varchar not null,
    scope varchar not null,
    instance_type varchar not null,
    zone varchar not null,
    judged_at timestamp not null,
    model_version varchar not null,
    drifting boolean not null,
    direction varchar not null,
    runs integer not null,
    outside integer not null,
    median_ratio double not null,
    chance double not null,
    since timestamp,
    newest_measured_at timestamp not null,
    noted_order bigint not null
);

-- Grain: one row per run whose step time was above the 90 % interval predicted by the champion at
-- that time, which had not learned from the run.
create table raw_alarms (
    run_id varchar not null,
    provider varchar not null,
    refresh_id varchar not null,
    judged_at timestamp not null,
    model_version varchar not null,
    workload varchar not null,
    cluster varchar not null,
    zone varchar not null,
    cause varchar not null,
    instance_type varchar not null,
    measured_s double not null,
    predicted_s double not null,
    high_s double not null,
    detail varchar not null,
    measured_at timestamp not null
);
