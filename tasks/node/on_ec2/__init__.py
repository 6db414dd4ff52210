"""What runs on a rented EC2 machine alone, as root: it carries the mailbox and keeps user code from
credentials.
"""
