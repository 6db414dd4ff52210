"""Cross-validation, promotion, backtests, drift, slow runs, regret."""
