"""Evaluate the model in use: cross-validation, promotion, backtests, drift, slow runs, regret."""
