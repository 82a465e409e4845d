"""The lease of a run on the bucket of its checkpoints: another run is refused while its holder lives.

The holder writes an object anew every BEAT_SECS. No clocks are compared: another run watches it for LEASE_SECS, and
takes it if it stayed as it was. Writes are conditional on what was read, where the store knows conditions; elsewhere
the last of two writers has the lease, and the other ends at its next beat or checkpoint.
"""

import contextlib
import itertools
import json
import logging
import os
import pathlib
import platform
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import tensorstore as ts

from jaxrl_async.config.fields import StartError
from jaxrl_async.records import SupersededError

NAME = "lease.json"  # in the bucket
BEAT_SECS = 10.0
LEASE_SECS = 60.0  # without a change, after which its holder counts as ended
CALL_SECS = 30.0  # deadline of a call to the store

log = logging.getLogger(__name__)


def kvstore_of(path: str) -> dict[str, Any]:
    """TensorStore's spec of a directory in a bucket, gs:// or s3://.

    An endpoint other than Amazon's has its name in AWS_ENDPOINT_URL, where s3fs reads it, too.
    """
    scheme, _, rest = path.partition("://")
    bucket, _, path = rest.partition("/")
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket, "path": path}
    url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path}
    if url:
        spec |= {"endpoint": url, "aws_region": region}
    if "AWS_ACCESS_KEY_ID" in os.environ:  # Else TensorStore logs the places where it finds none.
        spec["aws_credentials"] = {"type": "environment"}
    return spec


class Lease:
    """A run's lease on a bucket, as one process holds it; a later process of the same workdir takes it at once."""

    def __init__(self, directory: str, workdir: pathlib.Path):
        self.place = f"{directory}/{NAME}"
        self._directory = directory
        self._store = ts.KvStore.open(kvstore_of(f"{directory}/")).result(CALL_SECS)
        self._own = {"run": _run_of(workdir), "holder": secrets.token_hex(8)}
        self._own |= {"host": platform.node(), "workdir": str(workdir)}
        self._beats = itertools.count()
        self._lost: SupersededError | None = None

    def take(self) -> None:
        """Takes the lease; another run's only once it has not changed for LEASE_SECS.

        Raises:
          StartError: it changed: that run goes on.
        """
        first = found = self._store.read(NAME).result(CALL_SECS)
        deadline = time.monotonic() + LEASE_SECS
        while found.value and (holder := json.loads(found.value))["run"] != self._own["run"]:
            if found.value != first.value:
                raise StartError(
                    f"{self._directory} belongs to a run that goes on, {_words(holder)}: end it, name another "
                    f"checkpoint.directory, or delete {self.place}, which ends it within {BEAT_SECS:g} s. A run that "
                    f"was killed holds it for {LEASE_SECS:g} s"
                )
            if time.monotonic() > deadline:
                break
            if found is first:
                log.warning(
                    "%s is of a run %s: watched for %g s", self.place, _words(holder), LEASE_SECS
                )
            time.sleep(BEAT_SECS / 4)
            found = self._store.read(NAME).result(CALL_SECS)
        if not self._write(found):  # Another run was faster.
            self.take()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Takes the lease and keeps it during the block; gives it back where that ends without an error."""
        self.take()
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_SECS):
                try:
                    self._write(self.confirm())
                except SupersededError as error:
                    self._lost = error
                    return
                except Exception as error:  # The store is away for a while.
                    log.warning("%s is not renewed: %s", self.place, error)

        thread = threading.Thread(target=beat, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
        thread.join(2 * CALL_SECS)
        try:
            last = self.confirm().stamp.generation
            self._store.write(NAME, None, if_equal=last).result(CALL_SECS)
        except Exception as error:
            log.warning("%s is not given back: %s", self.place, error)

    def check(self) -> None:
        """Raises SupersededError where a beat has found the lease taken or deleted; asks nobody."""
        if self._lost:
            raise self._lost

    def confirm(self) -> ts.KvStore.ReadResult:
        """The lease as it is in the store; raises SupersededError where another process has it."""
        found = self._store.read(NAME).result(CALL_SECS)
        holder = json.loads(found.value) if found.value else {}
        if holder.get("holder") != self._own["holder"]:
            said = f"is of another run, {_words(holder)}" if holder else "was deleted"
            raise SupersededError(f"{self.place} {said}: this one ends")
        return found

    def _write(self, over: ts.KvStore.ReadResult) -> bool:
        """Whether the lease was still as it was read."""
        text = json.dumps(self._own | {"beat": next(self._beats)})
        done = self._store.write(NAME, text, if_equal=over.stamp.generation).result(CALL_SECS)
        return bool(done.generation)


def _words(holder: dict[str, Any]) -> str:
    return f"of {holder['host']} in {holder['workdir']}"


def _run_of(workdir: pathlib.Path) -> str:
    """The workdir's name at the bucket, which its later starts have, too."""
    path = workdir / ".lease"
    if not path.exists():
        workdir.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(8))
    return path.read_text()
