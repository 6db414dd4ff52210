"""Arithmetic on values and frames: no cloud, clock, disk or global random state."""
