"""Check for drift and slow runs, judge past recommendations, and report dollars and status."""
