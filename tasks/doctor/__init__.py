"""Check whether a refresh can run on this installation, and name a fix for each problem."""
