-- Grain: one row per slow run whose setup has not been measured again. Only the newest sixty.
select 'Slow runs' as title, * from alarms order by measured_at desc limit 60;
