-- Grain: one row per publication, workload, goal, constraint and rank. A promise is a published
-- first choice (rank 1). A goal of a publication is included, with all its ranks, only if a later
-- run may have measured its promise. Such a run is on the same cluster, after published_at and not
-- after promised_again_at. promised_again_at is the time of the next publication with the same
-- choice at the same rank. It is null if there is no such publication.
-- usd_per_hour and interruptions_per_hour apply to the whole cluster, as known at publication.
-- usd_per_hour includes volumes, addresses and requests if their costs were published. pools has
-- the interruptions per hour of one machine of each instance type, market and zone.
create or replace view promises as
with named as (
    select * exclude (market), to_json(cluster_offers) as offered
    from raw_recommendations
    where cluster is not null
),
members as (
    select provider, publication_id, published_at, offered, unnest(cluster_offers, recursive := true)
    from (select distinct provider, publication_id, published_at, offered, cluster_offers from named)
),
priced as (
    select
        members.provider,
        members.publication_id,
        members.offered,
        string_agg(distinct members.market, '+' order by members.market) as market,
        string_agg(
            concat(members."count", 'x', members.instance_type, '/', members.market, '/', members.zone),
            '+' order by members.instance_type, members.market, members.zone, members."count"
        ) as places,
        case when bool_and(members.usd_per_hour is not null) then sum(members."count" * members.usd_per_hour) end
            as usd_per_hour,
        sum(
            case when members.market = 'spot' then members."count" * coalesce(raw_offers.interruptions_per_hour, 0) else 0 end
        ) as interruptions_per_hour,
        list(
            {
                instance_type: members.instance_type,
                market: members.market,
                zone: members.zone,
                "count": members."count",
                interruptions_per_hour: coalesce(raw_offers.interruptions_per_hour, 0)
            }
            order by members.instance_type, members.market, members.zone
        ) as pools
    from members
    asof left join raw_offers
        on raw_offers.provider = members.provider
        and raw_offers.instance_type = members.instance_type
        and raw_offers.market = members.market
        and raw_offers.zone = members.zone
        and members.published_at >= raw_offers.as_of
    group by members.provider, members.publication_id, members.offered
),
ranked as (
    select
        named.*,
        priced.market,
        priced.places,
        -- Storage and other costs are spread over the hours. Some publications lack these costs.
        priced.usd_per_hour + coalesce((named.usd_storage + named.usd_other) / named.hours, 0) as usd_per_hour,
        priced.interruptions_per_hour,
        priced.pools,
        lead(named.published_at) over (
            partition by
                named.provider, named.workload, named.goal, named.constraint_hours, named.constraint_usd, named.rank,
                priced.places, named.layout, named.batch_per_device, named.accumulation_steps, named.strategy,
                named.precision, named.switches
            order by named.published_at, named.publication_id
        ) as promised_again_at
    from named
    join priced
        on priced.provider = named.provider
        and priced.publication_id = named.publication_id
        and priced.offered = named.offered
),
judged as (
    select publication_id, provider, workload, goal, constraint_hours, constraint_usd
    from ranked
    where rank = 1 and exists (
        select 1
        from stg_runs as runs
        where runs.provider = ranked.provider
            and runs.workload = ranked.workload
            and list_sort(string_split(runs.cluster, '+')) = list_sort(string_split(ranked.cluster, '+'))
            and runs.measured_at > ranked.published_at
            and (ranked.promised_again_at is null or runs.measured_at <= ranked.promised_again_at)
    )
)
select
    ranked.publication_id,
    ranked.published_at,
    ranked.promised_again_at,
    ranked.provider,
    ranked.workload,
    ranked.samples,
    ranked.global_batch,
    ranked.goal,
    ranked.constraint_hours,
    ranked.constraint_usd,
    ranked.p_required,
    ranked.rank,
    ranked.cluster,
    ranked.market,
    ranked.layout,
    ranked.batch_per_device,
    ranked.accumulation_steps,
    ranked.strategy,
    ranked.precision,
    ranked.switches,
    ranked.step_s,
    ranked.step_low_s,
    ranked.step_high_s,
    ranked.hours,
    ranked.usd,
    ranked.p_meets_constraint,
    ranked.usd_per_hour,
    ranked.interruptions_per_hour,
    ranked.pools,
    ranked.model_version
from ranked
join judged
    on judged.publication_id = ranked.publication_id
    and judged.provider = ranked.provider
    and judged.workload = ranked.workload
    and judged.goal = ranked.goal
    and judged.constraint_hours is not distinct from ranked.constraint_hours
    and judged.constraint_usd is not distinct from ranked.constraint_usd
order by ranked.published_at, ranked.publication_id, ranked.provider, ranked.workload, ranked.goal,
    ranked.constraint_hours, ranked.constraint_usd, ranked.rank;
