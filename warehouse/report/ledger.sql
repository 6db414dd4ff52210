-- Grain: one row per published first choice that was measured afterwards. Only the newest sixty of
-- each provider. ratio, low and high are the measured step time and the ends of the promised
-- interval, each divided by the promised step time.
select
    'Measured against promised step times of ' || provider as title,
    *,
    measured_step_s / promised_step_s as ratio,
    promised_step_low_s / promised_step_s as low,
    promised_step_high_s / promised_step_s as high
from regret_ledger
qualify row_number() over (partition by provider order by newest_measured_at desc) <= 60
order by title, newest_measured_at;
