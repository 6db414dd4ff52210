"""Choose the measurements to buy next: the value of information, pilots and the budget."""
