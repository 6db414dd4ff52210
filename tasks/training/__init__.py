"""Fit new models, and store models in the MLflow registry."""
