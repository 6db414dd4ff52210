"""What becomes of a job beside its work: waiting, starting up, interruptions, checkpoints. Knows no step time."""
