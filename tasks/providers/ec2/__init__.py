"""Provide EC2 machines: offers, launches, their records (leases), and file exchange through S3."""
