-- An unknown price is null, not 0. A cost is known if and only if all prices of its cluster are
-- known. Must return no row.
select format('{} {} rank {}: a price or cost is wrong: usd {}, offers {}', workload, goal, rank, usd, cluster_offers) as problem
from published
left join (
    select
        row_id,
        bool_or(not coalesce(usd_per_hour > 0 and isfinite(usd_per_hour), true)) as wrong_price,
        bool_and(usd_per_hour is not null) as priced
    from (select row_id, unnest(cluster_offers, recursive := true) from published)
    group by row_id
) as prices on prices.row_id = published.row_id
where not coalesce(isfinite(usd), true)  -- dollars_add_up and the next line make usd positive
    or not coalesce(usd_machines > 0, true)
    or not coalesce(usd_p90 > 0 and isfinite(usd_p90), true)
    or not coalesce(usd_per_million_samples > 0 and isfinite(usd_per_million_samples), true)
    or wrong_price
    or (cluster is not null and (usd is not null) is distinct from priced);
