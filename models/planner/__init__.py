"""Choose setups for a workload: enumerate clusters, split batches, rank, explain."""
