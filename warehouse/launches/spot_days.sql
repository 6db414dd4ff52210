-- Grain: one row per instance type, zone and UTC day. The row sums up the spot machines that were
-- requested on this day and that ran. hours are machine-hours.
select instance_type, zone, sum(hours) as hours, count(*) filter (interrupted) as interruptions
from raw_machines
where provider = $provider and market = 'spot' and hours > 0
group by instance_type, zone, date_trunc('day', asked_at)
order by instance_type, zone, date_trunc('day', asked_at);
