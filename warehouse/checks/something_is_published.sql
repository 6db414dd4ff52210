-- A publication has rows. Must return no row.
select 'there is nothing to recommend: no workload of srift.toml has a goal, or nothing is on offer' as problem
where not exists (select 1 from published);
