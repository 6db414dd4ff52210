"""Choose the runs to buy next: value of information, pilots, budget."""
