"""Choose and make the launches of a campaign, within its caps."""
