-- Grain: one row per launch, instance type and zone with interrupted spot machines. machines counts
-- the spot machines that ran. lost counts the machines among them that were interrupted.
select count(*) as machines, count(*) filter (interrupted) as lost
from raw_machines
where provider = $provider and market = 'spot' and hours > 0
group by lease_id, instance_type, zone
having bool_or(interrupted)
order by lease_id, instance_type, zone;
