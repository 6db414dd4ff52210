"""What a person sees: progress and tables."""
