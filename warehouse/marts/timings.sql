-- Grain: one row per refresh and phase, with the seconds of the phase.
create or replace view timings as
select refresh_id, phase, seconds
from raw_timings
order by refresh_id, seconds desc;
