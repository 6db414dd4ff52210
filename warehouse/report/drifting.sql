-- Grain: one row per group of recent runs that drifts.
select 'Drift' as title, * from drift where drifting order by provider, scope, instance_type, zone;
