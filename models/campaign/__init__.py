"""Which runs to buy next and why: value of information, pilots, budget."""
