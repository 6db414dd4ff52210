-- Grain: one row per refresh that held machines. Only the newest sixty of each provider.
select 'Dollars of each refresh of ' || provider as title, *
from spend
qualify row_number() over (partition by provider order by started_at desc) <= 60
order by title, started_at;
