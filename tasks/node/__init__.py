"""What travels to a machine: standard library and torch only, relative imports, run as `python -m node`."""
