"""Retraining, the MLflow registry and the registered model."""
