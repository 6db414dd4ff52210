"""Carry out launches: run torchrun, handle lost machines, and load the records of the runs."""
