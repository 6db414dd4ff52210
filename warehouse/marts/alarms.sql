-- Grain: one row a run that was slower than its interval when it was measured, and that no later run of the same setup
-- has followed: that one says how it is now.
create or replace view alarms as
select
    raw_alarms.run_id, raw_alarms.provider, raw_alarms.workload, raw_alarms.cluster, raw_alarms.zone, raw_alarms.cause,
    raw_alarms.instance_type, raw_alarms.measured_s, raw_alarms.predicted_s, raw_alarms.high_s, raw_alarms.detail,
    raw_alarms.measured_at, raw_alarms.judged_at, raw_alarms.model_version, raw_alarms.refresh_id
from raw_alarms
join run_details as slow on slow.run_id = raw_alarms.run_id
where not exists (
    select 1
    from run_details as later
    where later.provider = slow.provider and later.workload = slow.workload and later.cluster = slow.cluster
        and later.layout is not distinct from slow.layout and later.batch_per_device = slow.batch_per_device
        and later.accumulation_steps = slow.accumulation_steps and later.measured_at > slow.measured_at
)
order by raw_alarms.provider, raw_alarms.measured_at desc, raw_alarms.run_id;

comment on view alarms is 'One row a run that was slower than its interval and was not measured again since, with the likely cause.';
comment on column alarms.run_id is 'The run. No unit.';
comment on column alarms.workload is 'Workload. No unit.';
comment on column alarms.zone is 'Zone of the machines; empty where unknown. No unit.';
comment on column alarms.cause is 'host: processor time was taken away by what the machine runs on; speed: fixed work on the machines took longer than usual too, so that they were slow, not the code; machine: one machine computes slower than its equals; link: communication is slower than expected; input: making batches; compute: all machines alike. No unit.';
comment on column alarms.instance_type is 'Instance type of the machine or machines that are slow; empty where the cause is not theirs. No unit.';
comment on column alarms.measured_s is 'Measured step time. Unit: seconds.';
comment on column alarms.predicted_s is 'What the champion had predicted. Unit: seconds.';
comment on column alarms.high_s is 'Upper end of its 90 % interval. Unit: seconds.';
comment on column alarms.detail is 'The cause in words, with its figures. No unit.';
comment on column alarms.measured_at is 'When the run ended, UTC.';
comment on column alarms.judged_at is 'When it was judged, UTC.';
comment on column alarms.model_version is 'Version of the registered model that had predicted. No unit.';
comment on column alarms.refresh_id is 'Refresh that judged. No unit.';
