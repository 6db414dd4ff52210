"""Built-in workloads. Each file needs torch alone, as a user's workload, and is sent likewise."""
