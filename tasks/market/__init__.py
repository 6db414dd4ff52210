"""Read current offers and prices, and learn how launches of a provider's machines went."""
