-- Grain: one row a row of the current publications.
select * from recommendations;
