-- Grain: one row per row of the current publications.
select * from recommendations;
