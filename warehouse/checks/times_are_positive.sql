-- The times and the throughput of a row with a cluster are positive and finite. Must return no row.
select format('{} {} rank {}: step {} s, {} samples/s, {} hours, p90 {} hours', workload, goal, rank, step_s, samples_per_s, hours, hours_p90)
    as problem
from published
where cluster is not null
    and not coalesce(
        least(step_s, step_low_s, step_high_s, samples_per_s, hours, hours_p90) > 0
        and isfinite(step_s) and isfinite(step_low_s) and isfinite(step_high_s)
        and isfinite(samples_per_s) and isfinite(hours) and isfinite(hours_p90),
        false
    );
