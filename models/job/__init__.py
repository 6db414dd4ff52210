"""Hours and dollars of a whole job: start-up, capacity, interruptions, checkpoints, cost."""
