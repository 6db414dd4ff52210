"""Enumerates clusters, splits batches, bounds, ranks and explains."""
