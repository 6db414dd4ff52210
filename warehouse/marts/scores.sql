-- Grain: one row per provider, model version, refresh, split and group of the scoreboard. Errors
-- and widths are fractions.
create or replace view scores as
select * from raw_scores order by all;
