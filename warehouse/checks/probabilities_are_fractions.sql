-- Probabilities lie in 0 to 1. Must return no row.
select format(
        '{} {} rank {}: required {}, meets {}, best {}', workload, goal, rank, p_required, p_meets_constraint, p_best
    ) as problem
from published
where p_required not between 0 and 1 or p_meets_constraint not between 0 and 1 or p_best not between 0 and 1;
