"""Model a whole job: start-up, capacity, interruptions, checkpoints, hours and dollars."""
