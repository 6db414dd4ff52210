-- Grain: one row a provider, scope, instance type and zone whose recent runs were ever judged by a champion that had not
-- learned from them: the newest judgement. A group without a new run keeps its last one.
create or replace view drift as
select
    provider, scope, instance_type, zone, drifting, direction, runs, outside, median_ratio, chance, since,
    newest_measured_at, judged_at, model_version, refresh_id
from raw_drift
qualify row_number() over (partition by provider, scope, instance_type, zone order by judged_at desc, noted_order desc) = 1
order by provider, scope, instance_type, zone;

comment on view drift is 'One row a provider, scope, instance type and zone: do its recent runs lie outside the intervals that were predicted before they were measured?';
comment on column drift.scope is 'type: an instance type in a zone; provider: all recent runs together. No unit.';
comment on column drift.instance_type is 'Instance type; a run on mixed machines counts for each of its types. Empty for scope provider. No unit.';
comment on column drift.zone is 'Zone of the machines; empty where unknown, and for scope provider. No unit.';
comment on column drift.drifting is 'Do more recent runs lie outside their 90 % intervals than chance explains? No unit.';
comment on column drift.direction is 'slower, faster or either way: on which side of their intervals they lie; none where none does. No unit.';
comment on column drift.runs is 'Recent runs judged, unseen by the model, the newest first. Unit: runs.';
comment on column drift.outside is 'How many of them lie outside their 90 % interval. Unit: runs.';
comment on column drift.median_ratio is 'Median of measured over predicted step time. Unit: ratio; above 1 is slower than predicted.';
comment on column drift.chance is 'Chance of so many outside if the intervals were right (binomial against one in ten). Unit: fraction, 0 to 1.';
comment on column drift.since is 'Time of the first run of this drift that lay outside, UTC. NULL where none does.';
comment on column drift.newest_measured_at is 'Time of the newest run judged, UTC.';
comment on column drift.judged_at is 'When this judgement was made, UTC.';
comment on column drift.model_version is 'Version of the registered model that had predicted. No unit.';
comment on column drift.refresh_id is 'Refresh that judged. No unit.';
