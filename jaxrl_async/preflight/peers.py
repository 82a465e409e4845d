"""The preflight of a run's servers and reward services, before the warm start.

Those that answer are checked; the others are named, and awaited by those who need them.
"""

import asyncio
import functools
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from jaxrl_async import parts
from jaxrl_async.active_clock import ActiveClock
from jaxrl_async.config.settings import Settings
from jaxrl_async.preflight import server
from jaxrl_async.rollout.teachers import Teachers
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.port import Adapters, Expected, ServerError, UnfitServerError

MAX_CONCURRENT = 64  # servers
VOCAB_PADDING = 1024  # ids by which models with one tokenizer are padded apart

log = logging.getLogger(__name__)


class PreflightError(ValueError):
    """Servers or reward services that cannot take part in the run; the message has a line for each."""


def expected_of(settings: Settings, config: Any) -> Expected:
    """The needs of a run, from its settings and its ModelConfig."""
    if settings.model.path:
        path = parts.model_directory(settings, ("config.json",)) / "config.json"
        content = json.loads(path.read_text("utf-8"))
    else:
        from jaxrl_async.models import hf

        content = hf.write_config(config)
    adapters = None
    if config.lora:
        has_files = parts.has_base_files(settings)
        kept = server.kept_adapters(settings.queue.max_staleness)
        adapters = Adapters(**vars(config.lora), has_base_files=has_files, kept=kept)
    return Expected(
        config=content,
        max_total_tokens=settings.server.max_total_tokens,
        transport=settings.weights.transport,
        api_key_env=settings.server.api_key_env,
        admin_api_key_env=settings.server.admin_api_key_env,
        adapters=adapters,
        insecure=settings.security.insecure,
        max_kept=parts.record_of(settings).max_kept,
        replay_routes=settings.learner.replay_routes if config.num_experts else "",
    )


def check_of(
    settings: Settings, expected: Expected
) -> Callable[[InferenceClient, str], Awaitable[Any]]:
    """The preflight of one server, as the publisher calls it before a server's first push."""
    return functools.partial(server.check, expected=expected, timeout_secs=_timeout_of(settings))


def _timeout_of(settings: Settings) -> float:
    """Bound on the check of one server: nobody waits longer for it than for its start or for a push to it."""
    return min(settings.weights.push_timeout_secs, settings.server.start_timeout_secs)


def check_servers(settings: Settings, expected: Expected) -> bool:
    """Checks every server and router that answers; one that is not up yet is left to its first push.

    Returns:
      Whether one of them verifies nothing itself.

    Raises:
      PreflightError: a line for each server that cannot take part.
    """
    return asyncio.run(_check_servers(settings, expected))


async def _check_servers(settings: Settings, expected: Expected) -> bool:
    slots, controls = asyncio.Semaphore(MAX_CONCURRENT), settings.server.controls
    servers = {control: server.check for behind in controls.values() for control in behind}
    checks = dict.fromkeys(controls, server.check_router) | servers
    options = {"expected": expected, "timeout_secs": _timeout_of(settings)}

    async def check(address: str) -> Any:
        async with slots:
            try:
                return await checks[address](client, address, **options)
            except ServerError as error:
                return error

    async with InferenceClient(**parts.keys_of(settings), tls_ca=settings.server.tls_ca) as client:
        found = await asyncio.gather(*map(check, checks))
    errors = [e for e in found if isinstance(e, ServerError)]
    unfit = [str(e) for e in errors if isinstance(e, UnfitServerError) or not e.retryable]
    _refuse(unfit, f"{len(checks)} inference servers")
    for error in errors:
        log.info("not up yet, waited for until its first push: %s", error)
    return any(getattr(kind, "verifies_itself", True) is False for kind in found)


def check_rewards(settings: Settings) -> None:
    """Asks every reward service of a run once, and warns of each that does not answer: the workers ask the others.

    Raises:
      PreflightError: a line for each that refuses the token, or judges by another reward.
    """
    addresses = settings.rollout.reward_addresses
    if not addresses:
        return
    client = parts.reward_client_of(settings, parts.task_of(settings).reward)
    silent, unfit = asyncio.run(client.look())
    _refuse(unfit, f"{len(addresses)} reward services")
    for line in silent:
        log.warning("%s", line)


def check_teachers(settings: Settings, expected: Expected) -> None:
    """Asks every teacher that is a server once; the workers wait for one that is not up yet.

    Raises:
      PreflightError: a line for each that refuses, has another vocabulary, or scores no row as long as the run's.
    """
    if (teachers := parts.teachers_of(settings, ActiveClock())) is not None:
        asyncio.run(_check_teachers(settings, teachers, expected.config["vocab_size"]))


async def _check_teachers(settings: Settings, teachers: Teachers, vocab_size: int) -> None:
    timeout = {"timeout_secs": _timeout_of(settings)}
    longest = min(settings.learner.row_tokens, settings.server.max_total_tokens)

    async def check(address: str) -> ServerError | None:
        try:
            kind = await teachers.client.recognise(address, **timeout)
            found = await kind.vocab_size(**timeout)
            if found is not None and not vocab_size <= found <= vocab_size + VOCAB_PADDING:
                reason = f"a teacher of {found} token ids has another vocabulary than the run, of {vocab_size}"
                return UnfitServerError(address, kind.INFO, reason)
            await kind.score([0] * longest, 1, **timeout)
        except ServerError as error:
            return error

    addresses = set(teachers.addresses.values())
    async with teachers.client:
        found = await asyncio.gather(*map(check, addresses))
    errors = [error for error in found if error is not None]
    advice = ": loss.teacher_key_env must name its key"
    unfit = [f"{e}{advice * (e.status in (401, 403))}" for e in errors if not e.retryable]
    _refuse(unfit, f"{len(addresses)} teachers")
    for error in errors:
        log.warning("a teacher is not up yet: %s", error)


def _refuse(unfit: Sequence[str], all_: str) -> None:
    """Ends the run where there are unfit ones, a line for each."""
    if unfit:
        lines = "\n".join(unfit)
        raise PreflightError(f"{len(unfit)} of {all_} cannot take part in this run:\n{lines}")
