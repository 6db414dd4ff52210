-- What a recommendation costs by part, how likely its machines are to be interrupted, and who says so; null in rows that are
-- older.
alter table raw_recommendations add column market varchar;
alter table raw_recommendations add column usd_machines double;
alter table raw_recommendations add column usd_storage double;
alter table raw_recommendations add column usd_other double;
alter table raw_recommendations add column interruption_risk double;
alter table raw_recommendations add column expected_interruptions double;
alter table raw_recommendations add column interruption_source varchar;
alter table raw_recommendations add column placement_score integer;
alter table raw_offers add column interruption_source varchar;
