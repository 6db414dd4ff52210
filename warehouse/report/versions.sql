-- Grain: one row per model version. Only the newest sixty of each provider.
select 'Versions of the model of ' || provider as title, *
from model_versions
qualify row_number() over (partition by provider order by trained_at desc) <= 60
order by title, trained_at;
