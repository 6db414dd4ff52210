"""Instance types, offers, clusters, workloads, goals and setups as values."""
