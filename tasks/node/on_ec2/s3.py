"""Read and write this machine's folders in S3 through boto3.

AWS's Deep Learning AMIs (machine images) include boto3. On other images,
deployments/node-bootstrap.sh installs boto3. botocore gets the credentials of the machine's IAM
role from the metadata service.
"""

from dataclasses import dataclass
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

FAULTS = (OSError, BotoCoreError, ClientError)  # errors of the disk, the network and S3


def s3_client(region: str, endpoint: str | None, *, attempts: int, timeout_s: float) -> Any:
    """Return a boto3 client for S3.

    endpoint: the URL of a service that replaces AWS's S3; None means AWS.
    attempts: the number of attempts per request.
    timeout_s: the connection timeout and the read timeout, in seconds.
    """
    config = Config(
        retries={"mode": "standard", "total_max_attempts": attempts},
        connect_timeout=timeout_s,
        read_timeout=timeout_s,
        request_checksum_calculation="when_required",
        max_pool_connections=32,
    )
    return boto3.client("s3", region_name=region, endpoint_url=endpoint, config=config)


@dataclass
class MachineStore:
    """The folders `in/` and `out/` of this machine in the S3 bucket, below the prefix `root`.

    client: a boto3 client for S3.

    If a request fails, methods raise one of the errors listed in FAULTS.
    """

    client: Any
    bucket: str
    root: str

    def get(self, name: str) -> bytes:
        """Return the content of the S3 object `in/<name>` of this machine."""
        answer = self.client.get_object(Bucket=self.bucket, Key=f"{self.root}/in/{name}")
        return bytes(answer["Body"].read())

    def put(self, name: str, content: bytes) -> None:
        """Upload `content` to the S3 object `out/<name>` of this machine."""
        self.client.put_object(Bucket=self.bucket, Key=f"{self.root}/out/{name}", Body=content)
