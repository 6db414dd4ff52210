"""Acquire and end machines. Each provider implements the protocols in `base`."""
