-- A publication has rows. Must return no row.
select 'no recommendation at all' as problem
where not exists (select 1 from published);
