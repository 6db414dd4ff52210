-- Grain: one row per provider, workload and instance type. share is the time to load the largest
-- profiled batch, divided by the time to compute on that batch.
create or replace view input_shares as
select provider, workload, instance_type, arg_max(input_s / (forward_s + backward_s + optimizer_s), batch) as share
from profiles
where input_s is not null
group by provider, workload, instance_type
order by provider, workload, instance_type;
