"""Guards taken out one by one, each on a copy of the tree: does a test fail? `python -m tests.mutants`."""
