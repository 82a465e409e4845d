"""The rewards role: the reward of the run's task as a service, for its workers and evaluations. It imports no JAX."""

import asyncio
import logging
import signal

from jaxrl_async import parts
from jaxrl_async.config.checks import queue_access_of
from jaxrl_async.config.settings import Settings
from jaxrl_async.rewards import service

log = logging.getLogger(__name__)


async def run(settings: Settings, index: int) -> None:
    """Serves at rollout.reward_addresses[index] until it is interrupted.

    Raises:
      KeyboardInterrupt: after SIGTERM or SIGINT, once its processes have ended.
    """
    # A role of a scheduler's that is preempted works on until its learner has ended: another handler is there.
    if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await serve(settings, settings.rollout.reward_addresses[index])
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def serve(settings: Settings, address: str) -> None:
    """Serves the reward of a run's task at "host:port" until it is cancelled.

    Raises:
      OSError, ValueError, RewardError: as of `service.serve`.
    """
    pool = parts.reward_pool_of(settings, parts.task_of(settings).reward)
    await service.serve(
        address,
        pool,
        on_bound=lambda bound: log.info("reward %s at %s", pool.reward, bound),
        token=queue_access_of(settings)["token"],
        tls_cert=settings.queue.tls_cert,
        tls_key=settings.queue.tls_key,
        insecure=settings.security.insecure,
    )
