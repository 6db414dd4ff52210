"""Stands in for the node agent."""
