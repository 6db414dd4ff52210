"""Value types: instance types, offers, clusters, workloads, goals and setups."""
