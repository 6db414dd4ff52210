"""The next launch, under the caps."""
