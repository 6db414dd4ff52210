-- Grain: one row per provider, scope, instance type and zone: the newest judgement of recent runs
-- by a champion that had not learned from them. A group without a new run keeps its last judgement.
create or replace view drift as
select
    provider, scope, instance_type, zone, drifting, direction, runs, outside, median_ratio, chance, since,
    newest_measured_at, judged_at, model_version, refresh_id
from raw_drift
qualify row_number() over (partition by provider, scope, instance_type, zone order by judged_at desc, noted_order desc) = 1
order by provider, scope, instance_type, zone;

comment on view drift is 'One row per provider, scope, instance type and zone: whether its recent runs lie outside the intervals that were predicted before they were measured.';
comment on column drift.scope is 'Always type: an instance type in a zone. No unit.';
comment on column drift.instance_type is 'Instance type; a run on mixed machines counts for each of its types. No unit.';
comment on column drift.zone is 'Zone of the machines; empty if unknown. No unit.';
comment on column drift.drifting is 'True if more recent runs lie outside their 90 % intervals than chance explains. No unit.';
comment on column drift.direction is 'Side of the interval on which runs lie: slower, faster or either way; none if no run lies outside. No unit.';
comment on column drift.runs is 'Number of the newest runs that were judged; the model had not learned from them. Unit: runs.';
comment on column drift.outside is 'Number of judged runs outside their 90 % interval. Unit: runs.';
comment on column drift.median_ratio is 'Median of measured over predicted step time. Unit: ratio; above 1 is slower than predicted.';
comment on column drift.chance is 'Chance of at least that many runs outside if the intervals are right (binomial, one in ten). Unit: fraction, 0 to 1.';
comment on column drift.since is 'Time of the first run outside its interval in this drift, UTC. NULL if there is none.';
comment on column drift.newest_measured_at is 'Time of the newest run judged, UTC.';
comment on column drift.judged_at is 'When this judgement was made, UTC.';
comment on column drift.model_version is 'Version of the registered model that had predicted. No unit.';
comment on column drift.refresh_id is 'Refresh that judged. No unit.';
