-- A publication has at least one row. Must return no row.
select 'there is nothing to recommend: no workload of srift.toml has a goal, or there are no offers' as problem
where not exists (select 1 from published);
