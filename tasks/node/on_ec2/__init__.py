"""Code that runs as root on rented EC2 machines only.

The code transfers files between the machine and S3, and keeps user code away from the machine's
credentials.
"""
