"""Current offers and prices, and the start-up, interruptions and refusals of launches."""
