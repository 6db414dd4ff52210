-- Grain: one row per instance type and zone whose recent step times lie outside their predicted
-- intervals too often.
select 'Drift' as title, * from drift where drifting order by provider, scope, instance_type, zone;
