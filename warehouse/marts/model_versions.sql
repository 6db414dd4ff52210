-- Grain: one row per provider and challenger (a newly fitted model): whether it was promoted to
-- champion (the model in use), why, and its scores on held-out workloads, all groups together. A
-- new registry may repeat version numbers; refresh_id then differs.
create or replace view model_versions as
select
    raw_models.provider,
    raw_models.version,
    raw_models.trained_at,
    raw_models.training_digest,
    raw_models.promoted,
    raw_models.reason,
    raw_models.code_commit,
    raw_models.refresh_id,
    raw_scores.rows,
    raw_scores.mean_error,
    raw_scores.median_error,
    raw_scores.coverage_90
from raw_models
left join raw_scores
    on raw_scores.provider = raw_models.provider and raw_scores.version = raw_models.version
    and raw_scores.refresh_id = raw_models.refresh_id
    and raw_scores.split = 'workload' and raw_scores."group" = 'all'
order by raw_models.provider, raw_models.trained_at;
