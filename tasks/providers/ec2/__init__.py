"""The EC2 provider: offers, launches and their records (leases), and file exchange through S3."""
