"""The package that runs on each machine as `python -m node`. It needs only torch."""
