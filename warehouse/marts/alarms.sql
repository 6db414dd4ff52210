-- Grain: one row per run whose step time was above its predicted 90 % interval. A run has no row if a
-- later run measured the same setup, because the later run shows the current state.
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
        and later.accumulation_steps = slow.accumulation_steps and later.strategy = slow.strategy
        and later.precision = slow.precision and later.switches = slow.switches
        and later.measured_at > slow.measured_at
)
order by raw_alarms.provider, raw_alarms.measured_at desc, raw_alarms.run_id;

comment on view alarms is 'One row per run whose step time was above the 90 % interval predicted for it and whose setup has not been measured since, with the likely cause.';
comment on column alarms.run_id is 'Id of the run. No unit.';
comment on column alarms.workload is 'Name of the workload. No unit.';
comment on column alarms.zone is 'Zone of the machines; empty if unknown. No unit.';
comment on column alarms.cause is 'host: the hypervisor took CPU time away; speed: a fixed computation also took longer than usual, so the machines were slow, not the code; machine: one machine computes more slowly than the other machines of its type; link: communication is slower than predicted; input: making batches is slow; compute: all machines compute more slowly than predicted. No unit.';
comment on column alarms.instance_type is 'Instance type of the slow machine (cause machine), or of all machines if they have the same type (cause compute); empty for the other causes. No unit.';
comment on column alarms.measured_s is 'Measured step time. Unit: seconds.';
comment on column alarms.predicted_s is 'Step time that the model in use had predicted. Unit: seconds.';
comment on column alarms.high_s is 'Upper end of the 90 % interval of predicted_s. Unit: seconds.';
comment on column alarms.detail is 'Description of the cause, with figures. No unit.';
comment on column alarms.measured_at is 'When the run ended, UTC.';
comment on column alarms.judged_at is 'When the run was judged, UTC.';
comment on column alarms.model_version is 'Version of the registered model that had predicted the step time. No unit.';
comment on column alarms.refresh_id is 'Id of the refresh that judged the run. No unit.';
