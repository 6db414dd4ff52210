"""Code that runs as root, and only on rented EC2 machines.

The code transfers files between the machine and S3. It also blocks user code from the machine's
credentials.
"""
