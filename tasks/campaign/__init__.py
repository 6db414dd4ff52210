"""Choose and make the launches of a campaign, within its spending caps and time limit."""
