"""Code that runs as root on rented EC2 machines only.

It transfers files between the machine and S3, and blocks user code from the machine's credentials.
"""
