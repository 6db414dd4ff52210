-- Grain: one row per instance type and zone whose recent step times drift from the predictions.
select 'Drift' as title, * from drift where drifting order by provider, scope, instance_type, zone;
