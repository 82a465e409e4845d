"""The queue role: admission and journal behind the gRPC service."""

import functools
import logging
import os
import pathlib

import fsspec
from etils import epath

from jaxrl_async.config.checks import queue_access_of
from jaxrl_async.config.forms import delay_of
from jaxrl_async.config.settings import Settings
from jaxrl_async.parts import message_bytes_of, record_of, tokenizer_of, vocab_size_of
from jaxrl_async.queue import service
from jaxrl_async.queue.admission import Admission
from jaxrl_async.queue.journal import Journal, JournalError
from jaxrl_async.runtime.workdir import checkpoint_steps

ARCHIVED = "journal.sqlite"  # in a checkpoint in a bucket: a copy of the journal

log = logging.getLogger(__name__)


async def run(settings: Settings, workdir: pathlib.Path) -> None:
    """Serves the queue at queue.address until it is interrupted."""
    await serve(settings, service_of(settings, workdir))


async def serve(settings: Settings, queue: service.QueueService) -> None:
    """Serves a queue at queue.address until it is interrupted."""
    wanted = settings.queue
    await service.serve(
        wanted.address,
        queue,
        max_message_bytes=message_bytes_of(settings),
        on_bound=lambda address: log.info("queue at %s", address),
        token=queue_access_of(settings)["token"],
        tls_cert=wanted.tls_cert,
        tls_key=wanted.tls_key,
    )


def service_of(settings: Settings, workdir: pathlib.Path) -> service.QueueService:
    """The queue of a run, restored from its journal."""
    queue, B = settings.queue, settings.learner.groups_per_step
    admission = Admission(
        batch_groups=B,
        max_staleness=queue.max_staleness,
        push_every_steps=settings.weights.push_every_steps,
        max_running_groups=queue.max_running_groups,
        max_attempts=queue.max_attempts,
        permit_timeout_secs=queue.permit_timeout_secs,
        max_bytes=queue.max_bytes,
        chunk_groups=B if queue.order == "completion" else queue.chunk_groups or None,
        weight_delay=delay_of(settings.rollout.delay_steps)[0],
    )
    journal, directory = None, settings.checkpoint.directory
    if settings.journal.keep != "none":
        path = pathlib.Path(settings.journal.path or workdir / "journal.sqlite")
        if directory and not path.exists():
            _fetch(directory, workdir, path)
        journal = Journal(
            path,
            batch_groups=B,
            keep=settings.journal.keep,
            max_bytes=settings.journal.max_bytes or None,
            mode=settings.journal.mode,
            synchronous=settings.journal.synchronous,
        )
    return service.QueueService(
        admission,
        group_size=settings.rollout.group_size,
        vocab_size=vocab_size_of(settings, tokenizer_of(settings, workdir)),
        max_tokens=settings.learner.row_tokens,
        journal=journal,
        record=record_of(settings),
        archive=functools.partial(_archive, directory) if directory else None,
    )


def _archive(directory: str, step: int, path: pathlib.Path) -> None:
    """Moves a copy of the journal into a checkpoint that is being written to a bucket."""
    place = f"{directory}/{step}/{ARCHIVED}"
    try:
        store, there = fsspec.url_to_fs(place)
        store.put_file(os.fspath(path), there)
    except Exception as error:  # The libraries of stores have errors of their own.
        raise JournalError(f"the journal's copy is not written to {place}: {error}") from error
    path.unlink()


def _fetch(directory: str, workdir: pathlib.Path, path: pathlib.Path) -> None:
    """Gets the journal that belongs to the last checkpoint in a bucket, where there is one."""
    steps = checkpoint_steps(workdir, directory)
    place = f"{directory}/{steps[-1]}/{ARCHIVED}" if steps else ""
    if not place or not epath.Path(place).exists():
        return
    store, there = fsspec.url_to_fs(place)
    part = path.with_name(f"{path.name}.part")
    store.get_file(there, os.fspath(part))
    part.rename(path)
    log.info("the journal is that of %s", place)
