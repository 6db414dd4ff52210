-- Every row without a cluster states a reason. Must return no row.
select format('{} {}: {} without a reason', workload, goal, status) as problem
from published
where cluster is null and coalesce(trim(reason), '') = '';
