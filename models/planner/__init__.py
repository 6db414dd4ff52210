"""Choose the best setups for each goal of a workload, and explain the choice."""
