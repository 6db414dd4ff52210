-- Every goal has a row of rank 1. Must return no row.
select format('{} {}: no rank 1', workload, goal) as problem
from published
group by provider, workload, goal, constraint_hours, constraint_usd
having min(rank) <> 1;
