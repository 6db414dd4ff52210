"""The code that runs on each machine, started as `python -m node`.

Machines must have torch. on_ec2/ also needs boto3, and workloads/known/ also needs the libraries
that define its networks.
"""
