-- Every predicted step time lies within its interval. Must return no row.
select format('{} {} rank {}: step {} s is outside {} to {} s', workload, goal, rank, step_s, step_low_s, step_high_s) as problem
from published
where step_s is not null and not coalesce(step_s between step_low_s and step_high_s, false);
