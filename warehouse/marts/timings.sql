-- Grain: one row a refresh and phase: seconds that are not steps of a benchmark.
create or replace view timings as
select refresh_id, phase, seconds
from raw_timings
order by refresh_id, seconds desc;
