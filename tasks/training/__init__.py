"""Fit challengers, and keep models in the MLflow registry."""
