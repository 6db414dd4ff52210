"""Check whether a refresh can run on this installation, and name the fixes."""
