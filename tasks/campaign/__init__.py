"""Choose and carry out the launches of a refresh, within its dollar and time caps.

A launch measures runs on one rented cluster. All launches of a refresh are a campaign.
"""
