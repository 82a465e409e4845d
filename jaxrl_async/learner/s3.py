"""Lets orbax write arrays to s3://, as it does to gs://: orbax asks these functions, which know gs:// alone."""

import os
import re

from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from jaxrl_async.learner.lease import kvstore_of


def _normalized(path: str) -> str:
    return re.sub("^(gs|s3):/", r"\1://", os.path.normpath(path))


def install() -> None:
    """Replaces the functions."""
    gcs_utils._GCS_PATH_PREFIX = ("gs://", "s3://")
    gcs_utils.get_kvstore_for_gcs = kvstore_of
    tensorstore_utils._use_gcs_driver = lambda path: path.startswith(("gs://", "s3://"))
    tensorstore_utils._normalize_path = _normalized
