"""Imports and backtests of files: measurements, workloads and instance types."""
