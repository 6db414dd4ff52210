-- The rows of a publication, and the machines in the rows, belong to the provider of the
-- publication. Must return no row.
with machines as (
    select provider, workload, goal, rank, unnest(cluster_offers, recursive := true) from published
)
select format('{} {} rank {}: provider {} is not the provider of the publication', workload, goal, rank, provider) as problem
from published
where provider is distinct from $provider
union all
select format('{} {} rank {}: {} is an instance type of another provider', workload, goal, rank, instance_type)
from machines
where exists (select 1 from stg_instance_types as known where known.name = machines.instance_type)
    and not exists (
        select 1
        from stg_instance_types as known
        where known.name = machines.instance_type and known.provider = machines.provider
    );
