-- The dollars of a row are the sum of what they are paid for, and no part is below nothing (of machines: prices_are_never_zero). Must return no row.
select
    format(
        '{} {} rank {}: {} usd, but {} for machines, {} for storage and {} for the rest',
        workload, goal, rank, usd, usd_machines, usd_storage, usd_other
    ) as problem
from published
where usd is distinct from usd_machines + usd_storage + usd_other
    or usd_storage < 0 or usd_other < 0;
