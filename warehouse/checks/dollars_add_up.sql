-- usd is the sum of its three parts, and no part is negative. Must return no row.
select
    format(
        '{} {} rank {}: {} usd, but {} for machines, {} for storage and {} for the rest',
        workload, goal, rank, usd, usd_machines, usd_storage, usd_other
    ) as problem
from published
where usd is distinct from usd_machines + usd_storage + usd_other
    or usd_storage < 0 or usd_other < 0;
