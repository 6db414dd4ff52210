-- Grain: one row per provider and torch version (major.minor): the number of runs by Srift under
-- this version that count today. A run under another torch version makes all of these runs
-- outdated.
create or replace view torch_lines as
select provider, torch_line, count(*) as runs
from stg_current
where torch_line is not null and workload_same and instances_same and machine_same
group by provider, torch_line
order by provider, torch_line;
