"""Lets orbax write arrays to s3://, as it does to gs://: of a bucket it asks these functions, which know gs:// alone.

An endpoint other than Amazon's has its name in AWS_ENDPOINT_URL, where s3fs reads it, too.
"""

import os
import re
from typing import Any

from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

_of_gs = gcs_utils.get_kvstore_for_gcs


def _kvstore(path: str) -> dict[str, Any]:
    """TensorStore's spec of a directory in a bucket."""
    if not path.startswith("s3://"):
        return _of_gs(path)
    bucket, _, path = path.removeprefix("s3://").partition("/")
    url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path}
    if url:
        spec |= {"endpoint": url, "aws_region": region}
    if "AWS_ACCESS_KEY_ID" in os.environ:  # Else TensorStore logs the places where it finds none.
        spec["aws_credentials"] = {"type": "environment"}
    return spec


def _normalized(path: str) -> str:
    return re.sub("^(gs|s3):/", r"\1://", os.path.normpath(path))


def install() -> None:
    """Replaces the functions."""
    gcs_utils._GCS_PATH_PREFIX = ("gs://", "s3://")
    gcs_utils.get_kvstore_for_gcs = _kvstore
    tensorstore_utils._use_gcs_driver = lambda path: path.startswith(("gs://", "s3://"))
    tensorstore_utils._normalize_path = _normalized
