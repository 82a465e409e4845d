"""The queue role: admission and journal behind the gRPC service."""

import logging
import pathlib

from jaxrl_async.config.checks import queue_access_of
from jaxrl_async.config.forms import delay_of
from jaxrl_async.config.settings import Settings
from jaxrl_async.parts import message_bytes_of, record_of, tokenizer_of, vocab_size_of
from jaxrl_async.queue import service
from jaxrl_async.queue.admission import Admission
from jaxrl_async.queue.journal import Journal

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
    journal = None
    if settings.journal.keep != "none":
        journal = Journal(
            pathlib.Path(settings.journal.path or workdir / "journal.sqlite"),
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
    )
