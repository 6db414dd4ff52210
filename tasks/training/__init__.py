"""Fit new models, and keep models in the MLflow registry."""
