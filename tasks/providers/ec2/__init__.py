"""Provide EC2 machines: offers, leases, launches, and mailboxes in S3."""
