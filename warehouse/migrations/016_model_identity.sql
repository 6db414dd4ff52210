-- A registry that begins anew, its file having been moved away, counts versions from 1 again: the refresh that made a
-- model tells it from those of the same number before.
create table raw_models_before as select * from raw_models;
create table raw_scores_before as select * from raw_scores;
drop table raw_models;
drop table raw_scores;

-- One row a challenger that was registered.
create table raw_models (
    provider varchar not null,
    version varchar not null,
    trained_at timestamp not null,
    training_digest varchar not null,
    promoted boolean not null,
    reason varchar not null,
    code_commit varchar not null,
    refresh_id varchar not null,
    primary key (provider, version, refresh_id)
);
insert into raw_models by name select * from raw_models_before;

-- One row a line of a challenger's scoreboard.
create table raw_scores (
    provider varchar not null,
    version varchar not null,
    refresh_id varchar not null,
    split varchar not null,
    group_name varchar not null,
    rows bigint not null,
    mean_error double,
    median_error double,
    p90_error double,
    coverage_90 double,
    median_width double,
    primary key (provider, version, refresh_id, split, group_name)
);
insert into raw_scores by name
select raw_scores_before.*, coalesce(raw_models_before.refresh_id, '') as refresh_id
from raw_scores_before
left join raw_models_before
    on raw_models_before.provider = raw_scores_before.provider
    and raw_models_before.version = raw_scores_before.version;
drop table raw_models_before;
drop table raw_scores_before;
