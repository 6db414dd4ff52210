"""What is measured and sold: instance types, offers, clusters, workloads, goals, setups, and tables of setups."""
