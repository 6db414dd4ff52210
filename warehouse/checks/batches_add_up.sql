-- The sum over all instances of devices x batch x accumulation steps is the global batch. Must
-- return no row.
with parts as (
    select
        *,
        list_sum(regexp_extract_all(cluster, '(?:^|[+])(\d+)x', 1)::integer[])::bigint as instances,
        string_split(layout, '+')::integer[] as devices,
        string_split(batch_per_device, '+')::integer[] as batches
    from published
    where cluster is not null or layout is not null
),
places as (
    select *, unnest(range(1, instances + 1)) as place
    from parts
),
totals as (
    select
        row_id,
        sum(
            devices[case when len(devices) = 1 then 1 else place end]
            * batches[case when len(batches) = 1 then 1 else place end]
        ) * any_value(accumulation_steps) as total,
        bool_and(
            len(devices) in (1, instances) and len(batches) in (1, instances)
        ) as one_an_instance
    from places
    group by row_id
)
select
    format(
        '{} {} rank {}: {} layout {} batch {} x {} makes {} samples, but the global batch is {}',
        workload, goal, rank, cluster, layout, batch_per_device, accumulation_steps, total, global_batch
    ) as problem
from parts
left join totals on totals.row_id = parts.row_id
where total is distinct from global_batch or not coalesce(one_an_instance, false);
