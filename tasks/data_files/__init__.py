"""Read files of measurements, workloads and instance types, to import or to backtest them."""
