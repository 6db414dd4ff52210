"""Acquire and end machines. Each provider implements the interfaces in `base`."""
