-- Grain: one row per publication, provider, workload, goal, constraint and rank, of all
-- publications.
create or replace view recommendation_history as
select *
from raw_recommendations
order by published_at, publication_id, provider, workload, goal, constraint_hours, constraint_usd, rank;

comment on view recommendation_history is 'One row per publication, provider, workload, goal, constraint and rank, of all publications.';
comment on column recommendation_history.publication_id is 'Id of the publication: one consistent set of recommendations. No unit.';
comment on column recommendation_history.published_at is 'When the publication was made, UTC.';
comment on column recommendation_history.provider is 'Source of the machines: local or ec2. Measurements of local and ec2 are never pooled. Local prices are illustrative.';
comment on column recommendation_history.workload is 'Name of the training job.';
comment on column recommendation_history.samples is 'Samples that the whole training must process. Unit: samples.';
comment on column recommendation_history.global_batch is 'Samples of one optimizer step over the whole cluster. Unit: samples.';
comment on column recommendation_history.goal is 'cheapest_within_deadline, fastest_within_budget, cheapest or fastest.';
comment on column recommendation_history.constraint_hours is 'Deadline. Unit: hours. NULL if the goal has none.';
comment on column recommendation_history.constraint_usd is 'Budget. Unit: US dollars. NULL if the goal has none.';
comment on column recommendation_history.p_required is 'Probability with which the constraint must be met. Unit: fraction, 0 to 1. NULL if the goal has no constraint, or states no probability: then one half is required, and exceeding the constraint is penalised (overshoot_price in srift.toml).';
comment on column recommendation_history.rank is 'Rank among the setups for this goal; 1 is the best. No unit.';
comment on column recommendation_history.status is 'recommended (rank 1), measure_first (rank 1, but probably not the best, and the expected regret of choosing it is above 5 %; the column reason names the run to measure first), alternative, misses_constraint (p_meets_constraint is below p_required, or below one half if p_required is NULL), infeasible (no setup meets the goal; the column reason states what would have to change), no_price (no price is known), or unknown (no step time can be predicted). No unit.';
comment on column recommendation_history.cluster is 'Instances in rank order, as 2xNAME+1xOTHER. No unit.';
comment on column recommendation_history.cluster_offers is 'List of (instance_type, count, market, zone, usd_per_hour) in rank order. Unit of usd_per_hour: US dollars per hour of one instance; NULL if unknown.';
comment on column recommendation_history.device is 'Kinds of device in the cluster, joined by +, such as H100 or A10G+T4. No unit.';
comment on column recommendation_history.layout is 'Devices used on each instance: a single number if equal on all instances, else a number per instance, joined by +. Unit: devices.';
comment on column recommendation_history.batch_per_device is 'Samples per device in one micro-step: a single number if equal on all instances, else a number per instance, joined by +. Unit: samples.';
comment on column recommendation_history.accumulation_steps is 'Micro-steps of one optimizer step. Unit: micro-steps.';
comment on column recommendation_history.strategy is 'How the step is parallelised and communicated: ddp, fsdp, zero2, ddp-fp16, ddp-powersgd, ddp-mstopk, adasum, adasum-delta, tensor-1d, tensor-2d, tensor-2.5d, zero1, ps-1, ps-2, ps-4 or tables. No unit.';
comment on column recommendation_history.precision is 'Number format of the training: fp32, tf32, bf16 or fp16. No unit.';
comment on column recommendation_history.switches is 'Switches in use, joined by +: checkpointing (of activations), compile (torch.compile), offload (states to host memory); or none. No unit.';
comment on column recommendation_history.region is 'Region of the machines. No unit.';
comment on column recommendation_history.step_s is 'Predicted time of one optimizer step at steady state. Unit: seconds.';
comment on column recommendation_history.step_low_s is 'Lower end of the 90 % interval of step_s. Unit: seconds.';
comment on column recommendation_history.step_high_s is 'Upper end of the 90 % interval of step_s. Unit: seconds.';
comment on column recommendation_history.samples_per_s is 'Predicted throughput of the whole cluster. Unit: samples/second.';
comment on column recommendation_history.hours is 'Expected duration of the whole training, including start-up, checkpoints and interruptions. Unit: hours.';
comment on column recommendation_history.hours_p90 is '90th percentile of hours. Unit: hours.';
comment on column recommendation_history.usd is 'Expected cost of the whole training. Unit: US dollars. NULL if a price is unknown, never 0.';
comment on column recommendation_history.usd_p90 is '90th percentile of usd. Unit: US dollars.';
comment on column recommendation_history.usd_per_million_samples is 'Expected cost of a million samples. Unit: US dollars.';
comment on column recommendation_history.p_meets_constraint is 'Probability that this setup meets the constraint. Unit: fraction, 0 to 1.';
comment on column recommendation_history.p_best is 'Probability that this setup is the best for the goal. Unit: fraction, 0 to 1.';
comment on column recommendation_history.bottleneck is 'What limits the step time, such as compute or communication between nodes. No unit.';
comment on column recommendation_history.measured_runs is 'Number of measured runs of exactly this setup. Unit: runs.';
comment on column recommendation_history.reason is 'Why the setup has this rank, or why no setup meets the goal and what would have to change. Text.';
comment on column recommendation_history.price_as_of is 'Time of the oldest price used, UTC.';
comment on column recommendation_history.newest_measurement_at is 'Time of the newest measurement of this workload, UTC.';
comment on column recommendation_history.model_version is 'Version of the registered model that predicted the step time. No unit.';
comment on column recommendation_history.market is 'Market of the machines: on-demand, spot, or mixed for a cluster with both. NULL if no cluster is named.';
comment on column recommendation_history.usd_machines is 'Part of usd for the machines, at negotiated prices if srift.toml states them. Unit: US dollars. NULL if a price is unknown.';
comment on column recommendation_history.usd_storage is 'Part of usd for the machines'' volumes; 0 for local hosts, which have none. Unit: US dollars.';
comment on column recommendation_history.usd_other is 'Part of usd for public addresses, requests to S3, and downloads of the workload''s data as in its last launch on EC2; 0 for local hosts, which have none. usd is usd_machines + usd_storage + usd_other, added in that order. Unit: US dollars.';
comment on column recommendation_history.interruption_risk is 'Probability that the job is interrupted at least once before it is done; 0 without spot machines. Unit: fraction, 0 to 1.';
comment on column recommendation_history.expected_interruptions is 'Expected number of interruptions of the whole job. Unit: interruptions.';
comment on column recommendation_history.interruption_source is 'Source of interruption_risk and its age: launches of Srift, Spot Advisor, a stated prior, or srift.toml. Text; NULL without spot machines.';
comment on column recommendation_history.placement_score is 'Spot placement score that EC2 gave the cluster in its zone at publication, from 1 (capacity is unlikely) to 10. No unit. NULL if EC2 gave no score.';
comment on column recommendation_history.compute_s is 'Part of step_s in which the slowest device computes: all micro-steps, the optimizer, and making batches if the workload has no DataLoader. Unit: seconds.';
comment on column recommendation_history.communication_s is 'All communication of a step, overlapped with compute or not. Unit: seconds.';
comment on column recommendation_history.exposed_communication_s is 'Part of step_s for communication that is not overlapped with compute. Unit: seconds.';
comment on column recommendation_history.input_s is 'Part of step_s in which devices wait for input; step_s is compute_s + exposed_communication_s + input_s. Unit: seconds.';
comment on column recommendation_history.tokens_per_s is 'Predicted throughput of the whole cluster. Unit: tokens/second. NULL if the length of a sequence is unknown.';
comment on column recommendation_history.tokens_per_s_per_gpu is 'tokens_per_s divided by the number of devices. Unit: tokens/second.';
comment on column recommendation_history.mfu is 'Model FLOPs utilisation: FLOPs of a step without recomputation, divided by what the devices could do in step_s at the peak rates of their data sheets. Unit: fraction, 0 to 1. NULL if the FLOPs or a data sheet are unknown.';
comment on column recommendation_history.memory_gib is 'Predicted peak memory of the device that has the least memory left. Unit: GiB. NULL if unknown.';
comment on column recommendation_history.memory_available_gib is 'Memory of the device that memory_gib describes. Unit: GiB.';
