"""Import and backtest data files: measurements, workloads and instance types."""
