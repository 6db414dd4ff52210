-- Grain: one row a provider and line of torch (major.minor) under which runs were measured here that count today: how
-- many. A run measured under another line makes all of them history.
create or replace view torch_lines as
select provider, torch_line, count(*) as runs
from stg_current
where torch_line is not null and workload_same and instances_same and machine_same
group by provider, torch_line
order by provider, torch_line;
