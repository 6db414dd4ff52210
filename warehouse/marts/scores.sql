-- Grain: one row a provider, model version, refresh, split and group of its scoreboard. Errors and widths are fractions.
create or replace view scores as
select
    provider, version, split, group_name as "group", rows, mean_error, median_error, p90_error, coverage_90, median_width,
    refresh_id
from raw_scores
order by all;
