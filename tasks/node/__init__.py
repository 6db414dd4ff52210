"""The package that runs on a machine as `python -m node`: standard library and torch only."""
