"""Choose the best setups for a workload, and explain the choice."""
