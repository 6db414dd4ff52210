-- Returns place, column, text and reason for each implausible row of `staged`. All rows of
-- $workloads are checked. For other workloads, only rows that are not stored yet are checked.
-- `known_types` has provider, name, devices, precision and peak_tflops, for each precision that the
-- device supports. $most_ratio limits the ratio of step times of one setup. $headroom limits the
-- ratio of implied to peak TFLOP/s.
with setups as (
    select
        provider, workload, cluster, layout, batch_per_device, accumulation_steps, strategy, precision, switches,
        min(place) as place,
        min(step_s) as least_s,
        arg_min(place, step_s) as least_place,
        max(step_s) as most_s,
        arg_max(place, step_s) as most_place,
        max(flops_per_sample) as flops_per_sample
    from staged
    where list_contains($workloads, workload)
        or coalesce(run_id, row_digest) not in (select run_id from stg_imports)
    group by all
),
-- Also compare with stored runs of the same setup.
compared as (
    select
        setups.place,
        least_s,
        least_place,
        most_s,
        most_place,
        least(least_s, min(runs.step_s)) as fastest_s,
        greatest(most_s, max(runs.step_s)) as slowest_s
    from setups
    left join runs
        on runs.provider = setups.provider and runs.workload = setups.workload and runs.cluster = setups.cluster
        and runs.layout is not distinct from setups.layout and runs.batch_per_device = setups.batch_per_device
        and runs.accumulation_steps = setups.accumulation_steps and runs.strategy = setups.strategy
        and runs.precision = setups.precision and runs.switches = setups.switches
    group by setups.place, least_s, least_place, most_s, most_place
),
machines as (
    select
        setups.*,
        unnest(list_distinct(regexp_extract_all(cluster, '(?:^|\+)\d+x([^+]+)', 1))) as name,
        list_min(string_split(batch_per_device, '+')::bigint[]) as batch
    from setups
),
names as (
    select distinct provider, name from known_types
    union
    select provider, name from stg_instance_types
),
speeds as (
    select
        machines.least_place,
        machines.least_s,
        known_types.peak_tflops,
        machines.batch * machines.accumulation_steps
            * coalesce(workloads.flops_per_sample, machines.flops_per_sample) / machines.least_s / 1e12 as tflops
    from machines
    join known_types
        on known_types.provider = machines.provider and known_types.name = machines.name
        and known_types.precision = machines.precision
    left join workloads on workloads.provider = machines.provider and workloads.workload = machines.workload
)
select
    machines.place, 'cluster', machines.name,
    'is unknown: did you mean ' || any_value(names.name) || '?'
from machines
join names
    on names.provider = machines.provider
    and regexp_replace(names.name, '\D', '', 'g') = regexp_replace(machines.name, '\D', '', 'g')
    and damerau_levenshtein(lower(names.name), lower(machines.name)) <= 1
where len(machines.name) > 3
group by machines.place, machines.provider, machines.name
having not bool_or(names.name = machines.name)
union all
select machines.place, 'layout', machines.layout, 'uses more devices than a machine of the cluster has'
from machines
join known_types on known_types.provider = machines.provider and known_types.name = machines.name
group by machines.place, machines.cluster, machines.layout
having list_max(string_split(machines.layout, '+')::bigint[]) > max(known_types.devices)
    and count(distinct machines.name)
        = len(list_distinct(regexp_extract_all(machines.cluster, '(?:^|\+)\d+x([^+]+)', 1)))
union all
select machines.place, 'precision', machines.precision, 'is not supported by the devices of ' || machines.name
from machines
join known_types on known_types.provider = machines.provider and known_types.name = machines.name
group by machines.place, machines.precision, machines.name
having not bool_or(known_types.precision = machines.precision)
union all
select
    case when most_s > $most_ratio * fastest_s then most_place else least_place end, 'step_s',
    case when most_s > $most_ratio * fastest_s then most_s else least_s end::varchar,
    format('differs by a factor of {:.0f} from another run of the same setup: give seconds, not milliseconds', slowest_s / fastest_s)
from compared
where slowest_s > $most_ratio * fastest_s
union all
select
    least_place, 'step_s', least_s::varchar,
    format('implies {:.3g} TFLOP/s, but the peak is {:.3g}: check batch_per_device and flops_per_sample', tflops, peak_tflops)
from speeds
where tflops > $headroom * peak_tflops
order by 1;
