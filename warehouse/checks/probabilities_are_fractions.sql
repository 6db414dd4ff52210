-- Probabilities lie between 0 and 1. Must return no row.
select format(
        '{} {} rank {}: required {}, meets {}, best {}, interrupted {} ({} times)', workload, goal, rank, p_required,
        p_meets_constraint, p_best, interruption_risk, expected_interruptions
    ) as problem
from published
where p_required not between 0 and 1 or p_meets_constraint not between 0 and 1 or p_best not between 0 and 1
    or interruption_risk not between 0 and 1 or not coalesce(expected_interruptions >= 0, true);
