-- What campaigns of machines that share this warehouse may cost. As in 001: a later fact is a later row.

-- 'claimed' before a campaign buys: it may cost up to usd, and is expected to cost nothing after may_cost_until.
-- 'settled' once it is over and its home holds nothing of it. place is where a person finds that home.
create table raw_claims (
    event varchar not null check (event in ('claimed', 'settled')),
    refresh_id varchar not null,
    provider varchar not null,
    place varchar not null,
    usd double not null check (usd >= 0),
    noted_at timestamp not null,
    may_cost_until timestamp not null,
    noted_order bigint not null default nextval('noted_order'),
    primary key (event, refresh_id)
);
