"""Machines of EC2: offers, leases, launches, mailboxes in S3."""
