"""What judges Srift, each run as `python -m tests.benchmarks.NAME`."""
