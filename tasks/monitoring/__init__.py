"""Drift, slow runs, the regret ledger and the status."""
