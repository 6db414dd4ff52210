-- Find the cheapest cluster that trains a workload within 12 hours. Needs only the published file.
--     duckdb -readonly .srift/published/recommendations.duckdb < question.sql
select
    workload,
    cluster,
    market,
    round(usd, 3) as usd,
    round(usd_p90, 3) as usd_with_90_percent,
    round(hours, 2) as hours,
    round(hours_p90, 2) as hours_with_90_percent,
    round(p_best, 2) as chance_that_none_is_better
from recommendations
where provider = 'local' and workload = 'transformer-lm' and hours_p90 <= 12
order by usd, p_best desc
limit 1;
