"""Files of measurements, workloads and instance types: import and backtest."""
