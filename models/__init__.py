"""Compute on values and data frames, without network, clock, disk or global random state."""
