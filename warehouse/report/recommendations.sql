-- Grain: one row per provider, workload, goal, constraint and rank of the current publications.
select * from recommendations;
