-- usd is the sum of usd_machines, usd_storage and usd_other. Storage and other costs are not
-- negative. Must return no row.
select
    format(
        '{} {} rank {}: usd is {}, but usd_machines is {}, usd_storage is {} and usd_other is {}',
        workload, goal, rank, usd, usd_machines, usd_storage, usd_other
    ) as problem
from published
where usd is distinct from usd_machines + usd_storage + usd_other
    or usd_storage < 0 or usd_other < 0;
