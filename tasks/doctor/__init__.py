"""Check whether a refresh can work on this installation, and name the fixes."""
