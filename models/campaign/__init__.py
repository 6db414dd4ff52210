"""Choose which measurements to buy next, and decide if the budget permits them."""
