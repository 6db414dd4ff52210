-- Returns place, column, text and the broken rule for each invalid value of `staged`, ordered by
-- place.
with firsts as (
    select run_id, min(place) as first_place, arg_min(row_digest, place) as first_digest
    from staged
    where run_id is not null
    group by run_id
),
judged as (
    select
        place,
        coalesce(list_sum(try_cast(regexp_extract_all(texts.cluster, '(?:^|\+)(\d+)x', 1) as integer[])), 0) as instances,
        [
            {
                'name': 'workload', 'text': texts.workload, 'rule': 'must consist of letters, digits, ''.'', ''_'' and ''-''',
                'ok': regexp_full_match(texts.workload, '[A-Za-z0-9][A-Za-z0-9._-]*')
            },
            {
                'name': 'cluster', 'text': texts.cluster, 'rule': 'must list instances as 2xNAME+1xOTHER',
                'ok': instances between 1 and 10000
                    and regexp_full_match(texts.cluster, '([1-9]\d*x[A-Za-z0-9][A-Za-z0-9._-]*)(\+[1-9]\d*x[A-Za-z0-9][A-Za-z0-9._-]*)*')
            },
            {
                'name': 'batch_per_device', 'text': texts.batch_per_device, 'rule': 'must be a whole number, or a number per instance as 8+8+4',
                'ok': len(string_split(staged.batch_per_device, '+')) = len(string_split(texts.batch_per_device, '+'))
                    and len(string_split(staged.batch_per_device, '+')) in (1, instances)
            },
            {
                'name': 'layout', 'text': texts.layout, 'rule': 'must be a whole number, or a number per instance as 4+4+2',
                'ok': texts.layout = '' or len(string_split(staged.layout, '+')) = len(string_split(texts.layout, '+'))
                    and len(string_split(staged.layout, '+')) in (1, instances)
            },
            {
                'name': 'accumulation_steps', 'text': texts.accumulation_steps, 'rule': 'must be a whole number',
                'ok': staged.accumulation_steps is not null
            },
            {
                'name': 'precision', 'text': texts.precision, 'rule': 'must be one of ' || array_to_string($precisions, ', '),
                'ok': staged.precision in $precisions
            },
            {
                'name': 'strategy', 'text': texts.strategy, 'rule': 'must be one of ' || array_to_string($strategies, ', '),
                'ok': staged.strategy in $strategies
            },
            {
                'name': 'switches', 'text': texts.switches,
                'rule': 'must be none, or checkpointing, compile and offload joined by +; offload needs fsdp or zero2; tensor strategies and tables allow none',
                'ok': staged.strategy not in $strategies or (staged.strategy || ' ' || staged.switches) in $modes
            },
            {
                'name': 'provider', 'text': texts.provider, 'rule': 'must be one of ' || array_to_string($providers, ', '),
                'ok': staged.provider in $providers
            },
            {
                'name': 'gradient_bytes', 'text': texts.gradient_bytes,
                'rule': 'must be a whole number, and 1 to 16 bytes for each trained parameter',
                'ok': texts.gradient_bytes = ''
                    or staged.gradient_bytes / coalesce(staged.parameters, staged.gradient_bytes) between 1 and 16
            },
            {
                'name': 'parameters', 'text': texts.parameters, 'rule': 'must be a whole number',
                'ok': texts.parameters = '' or staged.parameters is not null
            },
            {
                'name': 'flops_per_sample', 'text': texts.flops_per_sample, 'rule': 'must be above 0',
                'ok': texts.flops_per_sample = '' or staged.flops_per_sample is not null
            },
            {
                'name': 'step_s', 'text': texts.step_s, 'rule': 'must be a number of seconds above 0',
                'ok': staged.step_s is not null
            },
            {
                'name': 'sync_s', 'text': texts.sync_s, 'rule': 'must be a number of seconds from 0 to step_s',
                'ok': texts.sync_s = '' or (
                    staged.sync_s is not null and coalesce(staged.sync_s <= staged.step_s, true)
                )
            },
            {
                'name': 'measured_at', 'text': texts.measured_at, 'rule': 'must be a past time in ISO 8601',
                'ok': texts.measured_at = '' or staged.measured_at <= $latest
            },
            {
                'name': 'run_id', 'text': texts.run_id, 'rule': 'already appears with other values in line or row ' || first_place,
                'ok': first_digest is null or row_digest = first_digest
            }
        ] as checks
    from staged
    join texts using (place)
    left join firsts on firsts.run_id = staged.run_id
),
wrong as (
    select place, unnest([one for one in checks if not coalesce(one.ok, false)]) as found
    from judged
)
select place, found.name, found.text, found.rule
from wrong
order by place;
