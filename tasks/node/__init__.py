"""The code that runs on each machine, started as `python -m node`. It needs only torch."""
