"""The code that runs on each machine, started as `python -m node`.

It needs only torch. Exceptions are on_ec2/, which needs boto3, and workloads/known/.
"""
