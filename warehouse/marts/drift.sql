-- Grain: one row per provider, scope, instance type and zone, with the newest test for drift. A
-- test compares recent runs with the predictions of the champion (the model then in use), which had
-- not learned from these runs. A group without new runs keeps its last test.
create or replace view drift as
select
    provider, scope, instance_type, zone, drifting, direction, runs, outside, median_ratio, chance, since,
    newest_measured_at, judged_at, model_version, refresh_id
from raw_drift
qualify row_number() over (partition by provider, scope, instance_type, zone order by judged_at desc, noted_order desc) = 1
order by provider, scope, instance_type, zone;

comment on view drift is 'One row per provider, scope, instance type and zone: whether recent step times lie outside the intervals that had been predicted.';
comment on column drift.scope is 'Kind of the group. Always type, which means an instance type in a zone. No unit.';
comment on column drift.instance_type is 'Instance type; a run on several instance types counts for each of them. No unit.';
comment on column drift.zone is 'Zone of the machines; empty if unknown. No unit.';
comment on column drift.drifting is 'True if more recent runs lie outside their 90 % intervals than chance explains. No unit.';
comment on column drift.direction is 'Side of the intervals on which runs lie outside: slower, faster or either way; none if no run lies outside. No unit.';
comment on column drift.runs is 'Number of recent runs that were judged. The model had not learned from these runs. Unit: runs.';
comment on column drift.outside is 'Number of judged runs outside their 90 % interval. Unit: runs.';
comment on column drift.median_ratio is 'Median of measured over predicted step time. Unit: ratio; above 1 is slower than predicted.';
comment on column drift.chance is 'Probability that at least as many of the runs lie outside if the 90 % intervals are right (binomial distribution, p = 0.1). Unit: fraction, 0 to 1.';
comment on column drift.since is 'Time of the first run outside its interval in this drift, UTC. NULL if the group does not drift.';
comment on column drift.newest_measured_at is 'Time of the newest judged run, UTC.';
comment on column drift.judged_at is 'When this judgement was made, UTC.';
comment on column drift.model_version is 'Version of the registered model that had predicted the step times. No unit.';
comment on column drift.refresh_id is 'Id of the refresh that made this judgement. No unit.';
