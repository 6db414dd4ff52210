"""Choose and carry out the launches of one refresh (a campaign), within dollar and time caps."""
