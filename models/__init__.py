"""Predict step times, choose setups and plan measurements.

The functions compute on values and data frames. They use no network, clock, disk or global random
state.
"""
