-- Grain: one row per launch and instance type, without replacements of lost machines. machines is the
-- number of machines in the launch. seconds is the time from the request until the last machine of the
-- type worked.
select instance_type, market, machines, max(startup_s) as seconds
from (
    select lease_id, instance_type, market, startup_s, count(*) over (partition by lease_id) as machines
    from raw_machines
    where provider = $provider and startup_s is not null and number = 0
)
group by lease_id, instance_type, market, machines
order by lease_id, instance_type, market;
