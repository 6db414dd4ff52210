"""Run launches: start attempts, handle lost machines, and load the records of the runs."""
