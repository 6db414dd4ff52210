-- A row without a feasible setup has a reason. Must return no row.
select format('{} {}: infeasible without a reason', workload, goal) as problem
from published
where status = 'infeasible' and coalesce(trim(reason), '') = '';
