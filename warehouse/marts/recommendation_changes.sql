-- Grain: one row per provider, workload, goal and constraint whose rank 1 differs between the
-- provider's current publication and the publication before it. If there is only one publication,
-- there is no row.
create or replace view recommendation_changes as
with publications as (
    select distinct provider, publication_id, published_at
    from recommendation_history
),
numbered as (
    select
        publications.*,
        row_number() over (
            partition by publications.provider
            order by current.publication_id is null, publications.published_at desc, publications.publication_id desc
        ) as age
    from publications
    left join (select distinct provider, publication_id from recommendations) as current
        on current.provider = publications.provider and current.publication_id = publications.publication_id
),
pairs as (
    select
        newer.provider, newer.publication_id, newer.published_at,
        older.publication_id as previous_publication_id, older.published_at as previous_published_at
    from numbered as newer
    join numbered as older on older.provider = newer.provider and older.age = 2
    where newer.age = 1
),
firsts as (
    select
        recommendation_history.*,
        max(newest_measurement_at) over (partition by publication_id, provider, workload) as measured_until
    from recommendation_history
    qualify rank = 1
),
now_first as (
    select firsts.*
    from firsts
    join pairs on pairs.provider = firsts.provider and pairs.publication_id = firsts.publication_id
),
then_first as (
    select firsts.*
    from firsts
    join pairs on pairs.provider = firsts.provider and pairs.previous_publication_id = firsts.publication_id
),
compared as (
    select
        coalesce(now_first.provider, then_first.provider) as provider,
        coalesce(now_first.workload, then_first.workload) as workload,
        coalesce(now_first.goal, then_first.goal) as goal,
        coalesce(now_first.constraint_hours, then_first.constraint_hours) as constraint_hours,
        coalesce(now_first.constraint_usd, then_first.constraint_usd) as constraint_usd,
        now_first.status as status,
        then_first.status as previous_status,
        now_first.cluster as cluster,
        then_first.cluster as previous_cluster,
        now_first.market as market,
        then_first.market as previous_market,
        now_first.region is distinct from then_first.region as region_changed,
        (
            now_first.layout, now_first.batch_per_device, now_first.accumulation_steps, now_first.strategy,
            now_first.precision, now_first.switches
        )
            is distinct from (
                then_first.layout, then_first.batch_per_device, then_first.accumulation_steps, then_first.strategy,
                then_first.precision, then_first.switches
            ) as split_changed,
        now_first.cluster_offers as offers,
        then_first.cluster_offers as previous_offers,
        now_first.hours as hours,
        then_first.hours as previous_hours,
        now_first.usd as usd,
        then_first.usd as previous_usd,
        now_first.status is null or then_first.status is null as goals_changed,
        now_first.price_as_of is distinct from then_first.price_as_of as prices_dated_anew,
        now_first.model_version is distinct from then_first.model_version as model_changed,
        now_first.measured_until is distinct from then_first.measured_until
            or (
                now_first.cluster = then_first.cluster and now_first.layout = then_first.layout
                and now_first.batch_per_device = then_first.batch_per_device
                and now_first.measured_runs is distinct from then_first.measured_runs
            ) as measurements_changed
    from now_first
    full join then_first
        on then_first.provider = now_first.provider and then_first.workload = now_first.workload
        and then_first.goal = now_first.goal
        and then_first.constraint_hours is not distinct from now_first.constraint_hours
        and then_first.constraint_usd is not distinct from now_first.constraint_usd
),
changed as (
    select *
    from compared
    where status is distinct from previous_status or cluster is distinct from previous_cluster
        or market is distinct from previous_market or region_changed or split_changed
        or hours is distinct from previous_hours or usd is distinct from previous_usd
),
offered as (
    select distinct publication_id, provider, workload, unnest(cluster_offers, recursive := true)
    from recommendation_history
    where publication_id in (select publication_id from pairs)
        or publication_id in (select previous_publication_id from pairs)
),
price_changes as (
    select distinct pairs.provider, newer.instance_type, newer.market, newer.zone
    from pairs
    join offered as newer on newer.provider = pairs.provider and newer.publication_id = pairs.publication_id
    join offered as older
        on older.provider = pairs.provider and older.publication_id = pairs.previous_publication_id
        and older.instance_type = newer.instance_type and older.market = newer.market and older.zone = newer.zone
    where older.usd_per_hour is distinct from newer.usd_per_hour
),
involved as (
    select provider, workload, goal, constraint_hours, constraint_usd, unnest(offers, recursive := true) from changed
    union
    select provider, workload, goal, constraint_hours, constraint_usd, unnest(previous_offers, recursive := true)
    from changed
),
repriced as (
    select distinct
        involved.provider, involved.workload, involved.goal, involved.constraint_hours, involved.constraint_usd
    from involved
    join price_changes
        on price_changes.provider = involved.provider and price_changes.instance_type = involved.instance_type
        and price_changes.market = involved.market and price_changes.zone = involved.zone
),
explained as (
    select
        changed.*,
        repriced.provider is not null
            -- Prices cannot be compared if only one publication has the offer. Then prices are the
            -- cause if nothing else is.
            or (prices_dated_anew and not goals_changed and not model_changed and not measurements_changed)
            as prices_changed
    from changed
    left join repriced
        on repriced.provider = changed.provider and repriced.workload = changed.workload
        and repriced.goal = changed.goal
        and repriced.constraint_hours is not distinct from changed.constraint_hours
        and repriced.constraint_usd is not distinct from changed.constraint_usd
)
select
    explained.provider, workload, goal, constraint_hours, constraint_usd,
    pairs.publication_id, pairs.published_at, pairs.previous_publication_id, pairs.previous_published_at,
    status, previous_status, cluster, previous_cluster, hours, previous_hours, usd, previous_usd,
    coalesce(
        nullif(
            concat_ws(
                ', ',
                case when goals_changed then 'goals' end,
                case when prices_changed and not goals_changed then 'prices' end,
                case when measurements_changed and not goals_changed then 'measurements' end,
                case when model_changed and not goals_changed then 'model' end
            ),
            ''
        ),
        'other'
    ) as cause,
    case
        when goals_changed then 'goal'
        when cluster is distinct from previous_cluster or market is distinct from previous_market or region_changed
            or (cluster is null and status is distinct from previous_status) then 'choice'
        when split_changed then 'split'
        when hours is distinct from previous_hours then 'time'
        else 'price'
    end as change,
    market, previous_market
from explained
join pairs on pairs.provider = explained.provider
order by explained.provider, workload, goal, constraint_hours, constraint_usd;

comment on view recommendation_changes is 'One row per provider, workload, goal and constraint whose rank 1 differs from the previous publication.';
comment on column recommendation_changes.previous_publication_id is 'Id of the previous publication. No unit.';
comment on column recommendation_changes.previous_published_at is 'When the previous publication was made, UTC.';
comment on column recommendation_changes.status is 'Status now; NULL if the goal is gone. No unit.';
comment on column recommendation_changes.previous_status is 'Status before; NULL if the goal is new. No unit.';
comment on column recommendation_changes.previous_cluster is 'Cluster at rank 1 before. No unit.';
comment on column recommendation_changes.hours is 'Expected hours of the training now. Unit: hours.';
comment on column recommendation_changes.previous_hours is 'Expected hours of the training before. Unit: hours.';
comment on column recommendation_changes.usd is 'Expected cost of the training now. Unit: US dollars.';
comment on column recommendation_changes.previous_usd is 'Expected cost of the training before. Unit: US dollars.';
comment on column recommendation_changes.cause is 'Causes of the change, joined by commas: prices, measurements, model, goals (the goal is new or gone); other if none of these changed. No unit.';
comment on column recommendation_changes.change is 'What is different: choice (another cluster, market or region, or no setup meets the goal any more), split (the same machines with another batch split), time (the same choice, other expected hours), price (the same choice and hours, other dollars) or goal (the goal is new or gone). No unit.';
comment on column recommendation_changes.market is 'Market at rank 1 now: on-demand, spot or mixed. NULL without a cluster.';
comment on column recommendation_changes.previous_market is 'Market at rank 1 before: on-demand, spot or mixed. NULL without a cluster.';
