-- Grain: one row per provider with measured promises (published first choices).
select
    'All promises' as title, provider, count(*) as measured,
    avg(within_interval::integer) as within,
    count(*) filter (where verdict = 'missed_constraint') as failures,
    count(regret) as compared, avg(regret) as mean_regret, max(regret) as worst_regret
from regret_ledger
group by provider
order by provider;
