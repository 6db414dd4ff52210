"""Check whether a refresh can run on this installation, and say how to fix what prevents it."""
