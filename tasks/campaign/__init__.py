"""Choose and make the launches of one refresh (a campaign), within its dollar and time caps."""
