"""Read current instance types and prices, and learn from past launches of machines."""
