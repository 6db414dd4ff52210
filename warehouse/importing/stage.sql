-- Creates the table `staged`, which has the rows of `texts` with typed columns. A value that cannot
-- be parsed becomes null, and problems.sql reports it. If equal rows have no run_id, each row gets
-- its own row_digest, so that all rows count.
create or replace temp macro whole(text) as case
    when try_cast(text as double) between 1 and 9e18 and try_cast(text as double) = floor(try_cast(text as double))
        then try_cast(try_cast(text as double) as bigint)
end;
create or replace temp macro positive(text) as case
    when try_cast(text as double) > 0 and isfinite(try_cast(text as double)) then try_cast(text as double)
end;
create or replace temp macro numbers(text) as
    array_to_string([whole(one)::varchar for one in string_split(text, '+')], '+');
create or replace temp table staged as
with typed as (
    select
        place,
        workload,
        cluster,
        numbers(nullif(layout, '')) as layout,
        numbers(batch_per_device) as batch_per_device,
        try_cast(whole(coalesce(nullif(accumulation_steps, ''), '1')) as integer) as accumulation_steps,
        coalesce(nullif(lower(strategy), ''), 'ddp') as strategy,
        case lower(precision)
            when '' then 'fp32'
            when 'float32' then 'fp32'
            when 'bfloat16' then 'bf16'
            when 'float16' then 'fp16'
            when 'half' then 'fp16'
            else lower(precision)
        end as precision,
        coalesce(nullif(array_to_string(list_sort(list_distinct(string_split(lower(switches), '+'))), '+'), ''), 'none')
            as switches,
        coalesce(nullif(provider, ''), 'ec2') as provider,
        whole(gradient_bytes) as gradient_bytes,
        whole(parameters) as parameters,
        positive(flops_per_sample) as flops_per_sample,
        nullif(market, '') as market,
        nullif(zone, '') as zone,
        nullif(source, '') as source,
        positive(step_s) as step_s,
        case when try_cast(sync_s as double) >= 0 and isfinite(try_cast(sync_s as double)) then try_cast(sync_s as double) end
            as sync_s,
        nullif(run_id, '') as run_id,
        timezone('UTC', try_cast(nullif(measured_at, '') as timestamptz)) as measured_at
    from texts
),
hashed as (
    select *, md5(json_array(*columns(* exclude (place)))::varchar) as content
    from typed
)
select
    * exclude (content),
    case
        when run_id is null and row_number() over (partition by content order by place) > 1
            then md5(content || row_number() over (partition by content order by place))
        else content
    end as row_digest
from hashed
order by place;
