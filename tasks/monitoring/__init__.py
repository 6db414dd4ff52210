"""Find drift and slow runs, judge past recommendations, and report spending and status."""
