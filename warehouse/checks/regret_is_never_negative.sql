-- Regret is at least 0, and is known if and only if the verdict is compared. The verdict agrees
-- with met_constraint and with the number of measured rivals. Must return no row.
select format('{} {} of {}: verdict {}, met {}, regret {}', workload, goal, publication_id, verdict, met_constraint, regret)
    as problem
from regret_ledger
where provider = $provider
    and (
        regret < 0
        or not isfinite(regret)
        or (verdict = 'compared') is distinct from (regret is not null)
        or (verdict = 'missed_constraint') is distinct from (met_constraint is not distinct from false)
        or (verdict = 'compared' and rivals_measured = 0)
        or rivals_measured > rivals_named
    );
