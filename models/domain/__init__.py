"""Define the value types: instance types, offers, clusters, workloads, goals and setups."""
