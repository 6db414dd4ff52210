-- In the ledger, which compares published promises with later runs, times and dollars are positive,
-- and every run is later than its promise. Must return no row.
select
    format(
        '{} {} of {}: promised {} s, measured {} s and {} hours in {} runs from {}',
        workload, goal, publication_id, promised_step_s, measured_step_s, measured_hours, runs, first_measured_at
    ) as problem
from regret_ledger
where provider = $provider
    and (
        not coalesce(
            least(promised_step_s, promised_hours, measured_step_s, measured_hours) > 0
            and isfinite(measured_step_s) and isfinite(measured_hours)
            and promised_step_s is not null and promised_hours is not null
            and runs > 0 and first_measured_at > published_at,
            false
        )
        or not coalesce(measured_usd > 0 and isfinite(measured_usd), true)
        or measured_p_meets not between 0 and 1
    );
