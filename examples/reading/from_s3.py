"""Read the table from a bucket: python from_s3.py s3://bucket/prefix

The operator copies the folder there: aws s3 sync .srift/published s3://bucket/prefix
Needs pandas and pyarrow. Credentials come from the usual sources of the AWS CLI.
AWS_ENDPOINT_URL names the endpoint of another S3-compatible store.
"""

import os
import sys

import pandas as pd
from pyarrow.fs import S3FileSystem

bucket = S3FileSystem(endpoint_override=os.environ.get("AWS_ENDPOINT_URL"))
path = sys.argv[1].removeprefix("s3://")
table = pd.read_parquet(f"{path}/recommendations.parquet", filesystem=bucket)
first = table[(table["rank"] == 1) & (table["status"] == "recommended")]
print(
    first[["workload", "goal", "cluster", "market", "hours", "usd", "published_at"]].to_string(
        index=False
    )
)
