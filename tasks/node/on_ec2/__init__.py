"""Code that runs as root on rented EC2 machines only.

It carries the mailbox to and from S3, and keeps user code away from the machine's credentials.
"""
