"""Offers and prices as of now, and what a job meets on them."""
