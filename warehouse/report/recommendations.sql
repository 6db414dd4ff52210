-- Grain: one row of the current publications.
select * from recommendations;
