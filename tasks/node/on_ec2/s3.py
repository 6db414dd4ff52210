"""S3 from a rented machine, through boto3.

boto3 is that of the machine image's Python: AWS's Deep Learning AMIs have it, and
deployments/node-bootstrap.sh installs it with pip where it is missing. botocore takes the
credentials of the machine's role from the metadata service and renews them. An error names S3's
code and never what was signed.
"""

from __future__ import annotations

from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError


class S3Error(OSError):
    """S3 refused, or did not answer. `code` is S3's error code, or the kind of fault."""

    def __init__(self, error: BotoCoreError | ClientError) -> None:
        refused = isinstance(error, ClientError)
        self.code = str(error.response["Error"]["Code"] if refused else type(error).__name__)
        super().__init__(str(error)[:500])


def s3_client(region: str, endpoint: str | None, *, attempts: int, timeout_s: float) -> Any:
    """Return boto3's client. `endpoint` is empty or None for AWS."""
    config = Config(
        retries={"mode": "standard", "total_max_attempts": attempts},
        connect_timeout=timeout_s,
        read_timeout=timeout_s,
        request_checksum_calculation="when_required",
        max_pool_connections=32,
    )
    return boto3.client("s3", region_name=region, endpoint_url=endpoint or None, config=config)


class MachineStore:
    """The folders `in/` and `out/` of this machine in the bucket."""

    def __init__(self, client: Any, bucket: str, root: str) -> None:
        self.client, self.bucket, self.root = client, bucket, root

    def get(self, name: str) -> bytes:
        """Return an object of `in/`. Raises S3Error."""
        try:
            answer = self.client.get_object(Bucket=self.bucket, Key=f"{self.root}/in/{name}")
            content: bytes = answer["Body"].read()
        except (BotoCoreError, ClientError) as error:
            raise S3Error(error) from None
        return content

    def put(self, name: str, content: bytes) -> None:
        """Write an object of `out/`. Raises S3Error."""
        try:
            self.client.put_object(Bucket=self.bucket, Key=f"{self.root}/out/{name}", Body=content)
        except (BotoCoreError, ClientError) as error:
            raise S3Error(error) from None
