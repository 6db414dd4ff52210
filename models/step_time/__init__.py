"""Seconds of one optimizer step of a setup, with 90 % intervals, and the memory it needs."""
