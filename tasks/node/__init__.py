"""The package that runs on each machine as `python -m node`; needs only torch."""
