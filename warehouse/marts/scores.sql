-- Grain: one row a provider, model version, split and group of its scoreboard. Errors and widths are fractions.
create or replace view scores as
select
    provider, version, split, group_name as "group", rows, mean_error, median_error, p90_error, coverage_90, median_width
from raw_scores
order by all;
