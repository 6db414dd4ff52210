"""Predict the seconds of one optimizer step, with 90 % intervals, and peak memory."""
