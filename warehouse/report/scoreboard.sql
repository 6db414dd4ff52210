-- Grain: one row per provider and split (a way to hold out runs): the scores of the newest model
-- version on held-out runs, over all groups together.
select format('Version {} of {} on rows that it had not seen', version, scores.provider) as title, scores.*
from scores
join model_versions using (provider, version, refresh_id)
where scores."group" = 'all'
qualify dense_rank() over (
    partition by scores.provider order by model_versions.trained_at desc, scores.refresh_id desc
) = 1
order by title, scores.split;
