-- No rank of a goal appears twice. Must return no row.
select format('{} {}: rank {} appears {} times', workload, goal, rank, count(*)) as problem
from published
group by provider, workload, goal, constraint_hours, constraint_usd, rank
having count(*) > 1;
