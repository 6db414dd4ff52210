-- What is on in a training beside its strategy and precision; before, nothing was.
alter table raw_recommendations add column switches varchar;
alter table raw_ledger add column switches varchar;
update raw_recommendations set switches = 'none' where cluster is not null;
update raw_ledger set switches = 'none';
