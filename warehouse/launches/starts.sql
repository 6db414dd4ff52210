-- Grain: one row per launch and instance type. Replacements of lost machines are left out. machines
-- counts the machines of the launch. seconds is the time from the request until the last machine of
-- the type was ready for work.
select instance_type, market, machines, max(startup_s) as seconds
from (
    select lease_id, instance_type, market, startup_s, count(*) over (partition by lease_id) as machines
    from raw_machines
    where provider = $provider and startup_s is not null and number = 0
)
group by lease_id, instance_type, market, machines
order by lease_id, instance_type, market;
