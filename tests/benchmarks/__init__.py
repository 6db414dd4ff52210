"""What judges Srift: rivals, replays, synthetic worlds and timings. Run as `python -m tests.benchmarks.NAME`."""
