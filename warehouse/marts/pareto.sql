-- Grain: one row a provider, workload and setup of the current publication that no other beats in both dollars and hours.
-- Setups without a price cannot be placed and are left out.
create or replace view pareto as
with setups as (
    select distinct on (
        provider, workload, cluster, cluster_offers, layout, batch_per_device, accumulation_steps, strategy, precision,
        switches
    )
        provider, workload, cluster, cluster_offers, layout, batch_per_device, accumulation_steps, strategy,
        precision, switches, global_batch, region, step_s, samples_per_s, hours, hours_p90, usd, usd_p90, price_as_of,
        publication_id, published_at, market, usd_machines, usd_storage, usd_other, interruption_risk,
        expected_interruptions
    from recommendations
    where status <> 'infeasible' and usd is not null and hours is not null
    order by rank
)
select setups.*
from setups
where not exists (
    select 1
    from setups as rival
    where rival.provider = setups.provider and rival.workload = setups.workload
        and rival.usd <= setups.usd and rival.hours <= setups.hours
        and (rival.usd < setups.usd or rival.hours < setups.hours)
)
order by provider, workload, usd, hours;

comment on view pareto is 'One row a provider, workload and setup that the current publication names (up to five a goal) and that no other of them beats in both dollars and hours.';
comment on column pareto.provider is 'Where the machines come from: local or ec2. Never pooled. Prices of local are illustrative.';
comment on column pareto.workload is 'Name of the training job.';
comment on column pareto.cluster is 'Instances in rank order, as 2xNAME+1xOTHER. No unit.';
comment on column pareto.cluster_offers is 'Ordered list of (instance_type, count, market, zone, usd_per_hour). Unit of usd_per_hour: US dollars an hour of one instance; NULL is unknown.';
comment on column pareto.layout is 'Devices used on each instance, one number where equal, else joined by +. Unit: devices.';
comment on column pareto.batch_per_device is 'Samples a device sees in one micro-step, one number where equal, else one an instance joined by +. Unit: samples.';
comment on column pareto.accumulation_steps is 'Micro-steps of one optimizer step. Unit: micro-steps.';
comment on column pareto.strategy is 'How the step is parallelised and communicated: ddp, fsdp, zero2, ddp-fp16, ddp-powersgd, ddp-mstopk, adasum, adasum-delta, tensor-1d, tensor-2d, tensor-2.5d, zero1, ps-1, ps-2, ps-4 or tables. No unit.';
comment on column pareto.precision is 'Number format of the training: fp32, tf32, bf16 or fp16. No unit.';
comment on column pareto.switches is 'What is on, joined by +: checkpointing (of activations), compile (torch.compile), offload (states to the host); none. No unit.';
comment on column pareto.global_batch is 'Samples of one optimizer step over the whole cluster. Unit: samples.';
comment on column pareto.region is 'Region of the machines. No unit.';
comment on column pareto.step_s is 'Predicted time of one optimizer step at steady state. Unit: seconds.';
comment on column pareto.samples_per_s is 'Predicted throughput of the whole cluster. Unit: samples/second.';
comment on column pareto.hours is 'Expected hours of the whole training, start-up, checkpoints and interruptions included. Unit: hours.';
comment on column pareto.hours_p90 is '90th percentile of hours. Unit: hours.';
comment on column pareto.usd is 'Expected cost of the whole training. Unit: US dollars. NULL where a price is unknown, never 0.';
comment on column pareto.usd_p90 is '90th percentile of usd. Unit: US dollars.';
comment on column pareto.price_as_of is 'Time of the oldest price used, UTC.';
comment on column pareto.publication_id is 'Id of the publication: one consistent set of recommendations. No unit.';
comment on column pareto.published_at is 'When it was published, UTC.';
comment on column pareto.market is 'Market of its machines: on-demand, spot, or mixed where there are machines of both. NULL where no cluster is named.';
comment on column pareto.usd_machines is 'Part of usd for the machines themselves, at the account''s own prices where srift.toml states any. Unit: US dollars. NULL where a price is unknown, and before this was published.';
comment on column pareto.usd_storage is 'Part of usd for the machines'' volumes; 0 for local hosts, which have none. Unit: US dollars. NULL before this was published.';
comment on column pareto.usd_other is 'Part of usd for public addresses and requests to S3; 0 for local hosts, which have none. usd is usd_machines + usd_storage + usd_other, added in that order. Unit: US dollars. NULL before this was published.';
comment on column pareto.interruption_risk is 'Probability that the job is interrupted at least once before it is done; 0 without spot machines. Unit: fraction, 0 to 1. NULL before this was published.';
comment on column pareto.expected_interruptions is 'Expected number of interruptions of the whole job. Unit: interruptions. NULL before this was published.';
