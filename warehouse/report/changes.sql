-- Grain: one row per goal whose first choice, or its hours or dollars, differ from those of the
-- previous publication.
select
    case when change in ('choice', 'split', 'goal') then 'Other choices' else 'The same choice at other hours or dollars' end
        as title,
    workload, provider, replace(goal, '_', ' ') as goal, constraint_hours, constraint_usd, change,
    previous_cluster, previous_market, previous_hours, previous_usd, cluster, market, hours, usd, cause
from recommendation_changes
order by title, provider, workload, goal;
