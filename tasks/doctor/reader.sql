-- Lets the role srift_reader read one database, but not change it. Run this script as the owner of
-- the database, once in each database, after the first refresh.
revoke create on schema public from public;
do $$
declare
    name text;
begin
    for name in select nspname from pg_namespace where nspname in ('public', 'srift_warehouse') loop
        execute format('grant usage on schema %I to srift_reader', name);
        execute format('grant select on all tables in schema %I to srift_reader', name);
        execute format('alter default privileges in schema %I grant select on tables to srift_reader', name);
    end loop;
end
$$;
