-- Grain: one row per publication, workload, goal and constraint whose first choice was measured
-- afterwards. If several publications in a row name the same choice, only the last publication
-- before a run has a row. The choice is compared with the runs up to the next row of the same
-- choice.
-- If a choice was judged several times, the row has the judgement with the most runs. Among equal
-- numbers of runs, the newest judgement counts.
create or replace view regret_ledger as
select
    publication_id, published_at, provider, model_version, workload, goal, constraint_hours, constraint_usd, p_required,
    cluster, market, layout, batch_per_device, accumulation_steps, strategy, precision, switches,
    promised_step_s, promised_step_low_s, promised_step_high_s, promised_hours, promised_usd, promised_p_meets,
    runs, measured_step_s, measured_hours, measured_usd, measured_p_meets, within_interval, met_constraint,
    rivals_named, rivals_measured, best_rival_rank, best_rival_cluster, best_rival_market, best_rival_batch_per_device,
    best_rival_accumulation_steps, best_rival_step_s, best_rival_hours, best_rival_usd,
    verdict, regret, first_measured_at, newest_measured_at, judged_at
from raw_ledger
qualify row_number() over (partition by promise_id order by evidence_runs desc, noted_order desc) = 1
order by published_at, publication_id, provider, workload, goal, constraint_hours, constraint_usd;

comment on view regret_ledger is 'One row per published first choice that was measured after publication: the promised values, the measured values, and the regret compared with other setups that were also measured.';
comment on column regret_ledger.publication_id is 'Id of the last publication that named this choice before it was measured. No unit.';
comment on column regret_ledger.published_at is 'When that publication was made, UTC.';
comment on column regret_ledger.model_version is 'Version of the registered model that predicted the step time. No unit.';
comment on column regret_ledger.cluster is 'Instances of the choice in rank order, as 2xNAME+1xOTHER. No unit.';
comment on column regret_ledger.market is 'Market of the choice: on-demand or spot. No unit.';
comment on column regret_ledger.promised_step_s is 'Predicted step time as published. Unit: seconds.';
comment on column regret_ledger.promised_step_low_s is 'Lower end of the 90 % interval of promised_step_s. Unit: seconds.';
comment on column regret_ledger.promised_step_high_s is 'Upper end of the 90 % interval of promised_step_s. Unit: seconds.';
comment on column regret_ledger.promised_hours is 'Expected hours of the whole training as published. Unit: hours.';
comment on column regret_ledger.promised_usd is 'Expected cost of the whole training as published. Unit: US dollars. NULL where a price is unknown.';
comment on column regret_ledger.promised_p_meets is 'Probability of meeting the constraint as published. Unit: fraction, 0 to 1. NULL where the goal has none.';
comment on column regret_ledger.runs is 'Number of runs of exactly this setup since publication. Unit: runs.';
comment on column regret_ledger.measured_step_s is 'Median step time of the measured runs. Unit: seconds.';
comment on column regret_ledger.measured_hours is 'Expected hours of the whole training at the measured step time, with start-up, checkpoints and interruptions as promised. Unit: hours.';
comment on column regret_ledger.measured_usd is 'Expected cost of the whole training at the measured step time and the published prices. Unit: US dollars. NULL where a price is unknown.';
comment on column regret_ledger.measured_p_meets is 'Probability of meeting the constraint at the measured step time, from simulated interruptions. Unit: fraction, 0 to 1. NULL where the goal has none.';
comment on column regret_ledger.within_interval is 'True if the measured step time lies in the promised 90 % interval. No unit.';
comment on column regret_ledger.met_constraint is 'True if measured_p_meets is at least p_required, or at least one half if p_required is NULL; false if the promise failed. NULL if the goal has no constraint. No unit.';
comment on column regret_ledger.rivals_named is 'Number of other setups that the publication named for the goal (rivals). The same setup in another market is not a rival. Unit: setups.';
comment on column regret_ledger.rivals_measured is 'Number of rivals that were also measured since publication. Unit: setups.';
comment on column regret_ledger.best_rival_rank is 'Published rank of the best rival, the measured rival that serves the goal best. Exceeding the constraint is penalised, or forbidden if p_required is stated. No unit. NULL without a measured rival.';
comment on column regret_ledger.best_rival_cluster is 'Instances of the best rival in rank order. No unit.';
comment on column regret_ledger.best_rival_market is 'Market of the best rival: on-demand or spot. No unit.';
comment on column regret_ledger.best_rival_batch_per_device is 'Samples per device of the best rival in one micro-step. Unit: samples.';
comment on column regret_ledger.best_rival_accumulation_steps is 'Micro-steps of one optimizer step of the best rival. Unit: micro-steps.';
comment on column regret_ledger.best_rival_step_s is 'Median of the measured step times of the best rival. Unit: seconds.';
comment on column regret_ledger.best_rival_hours is 'Expected hours of the whole training on the best rival at its measured step time. Unit: hours.';
comment on column regret_ledger.best_rival_usd is 'Expected cost of the whole training on the best rival at its measured step time. Unit: US dollars. NULL where a price is unknown.';
comment on column regret_ledger.verdict is 'compared (the constraint was met, and a rival was measured), missed_constraint (the promise failed), or no_rival_measured (the constraint was met or there is none, and no rival was measured). No unit.';
comment on column regret_ledger.regret is 'Dollars (cheapest goals) or hours (fastest goals) of the choice divided by those of the best measured setup, minus 1. Both include the penalty for exceeding the constraint. If p_required is stated, the best measured setup must meet the constraint with that probability. Unit: fraction, 0 and up. NULL unless the verdict is compared.';
comment on column regret_ledger.first_measured_at is 'Time of the first run that the judgement uses, UTC.';
comment on column regret_ledger.newest_measured_at is 'Time of the newest run that the judgement uses, UTC.';
comment on column regret_ledger.judged_at is 'When this judgement was made, UTC.';
