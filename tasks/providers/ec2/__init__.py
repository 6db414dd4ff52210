"""Provide EC2 machines: offers, leases, launches, and the exchange of files through S3."""
