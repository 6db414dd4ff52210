-- Grain: one row per instance type of a request for machines. granted is false if the request was
-- refused for lack of capacity.
with granted as (
    select distinct lease_id, instance_type, market, zone
    from raw_machines
    where provider = $provider
),
refused as (
    select unnest(list_distinct(regexp_extract_all(cluster, '\d+x([^+]+)', 1))) as instance_type, market, zone
    from refusals
    where provider = $provider
)
select instance_type, market, zone, true as granted from granted
union all
select instance_type, market, zone, false from refused
order by all;
