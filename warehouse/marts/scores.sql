-- Grain: one row per provider, model version, refresh, split and group of the scoreboard of a newly
-- fitted model. Errors and interval widths are fractions.
create or replace view scores as
select * from raw_scores order by all;
