"""The rollout role: one worker, between the queue and the inference servers. It imports no JAX."""

import asyncio
import contextlib
import functools
import pathlib
import signal
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from jaxrl_async import parts
from jaxrl_async.active_clock import ActiveClock
from jaxrl_async.config.checks import queue_access_of
from jaxrl_async.config.settings import Settings
from jaxrl_async.queue.calls import GrpcCalls
from jaxrl_async.queue.client import QueueClient
from jaxrl_async.records import READS_REWARD, READS_TASK, Wait
from jaxrl_async.rewards.overlong import overlong_penalty
from jaxrl_async.rollout.runner import Runner
from jaxrl_async.rollout.sampler import Sampler
from jaxrl_async.rollout.worker import STATUS_SECS, Worker
from jaxrl_async.runtime.gc_freeze import gc_freeze
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.fleet import Fleet
from jaxrl_async.servers.port import Servers
from jaxrl_async.tasks.prompts import prompt_stream
from jaxrl_async.tasks.task import Task
from jaxrl_async.tasks.tokenizer import Tokenizer

_T = TypeVar("_T")


async def run(settings: Settings, workdir: pathlib.Path, index: int) -> None:
    """Turns permits into groups until it is interrupted; SIGTERM cancels it.

    Raises:
      KeyboardInterrupt: after SIGTERM, once its requests are aborted and its permits left to others.
    """
    stopped = asyncio.Event()
    task, loop = asyncio.current_task(), asyncio.get_running_loop()

    def stop() -> None:
        stopped.set()
        task.cancel()

    # A role of a scheduler's that is preempted works on until its learner has ended: another handler is there.
    if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
        loop.add_signal_handler(signal.SIGTERM, stop)
    wanted, access = settings.queue, queue_access_of(settings)
    client = InferenceClient(**parts.servers_access_of(settings))
    calls = GrpcCalls(wanted.address, outage_secs=wanted.outage_secs, **access)
    try:
        await work(settings, workdir, index, client=client, queue=QueueClient(calls))
    except asyncio.CancelledError:
        if stopped.is_set():
            raise KeyboardInterrupt from None
        raise


async def work(
    settings: Settings, workdir: pathlib.Path, index: int, *, client: Servers, queue: QueueClient
) -> None:
    """Turns permits into groups until it is cancelled. `client` and `queue` are not opened yet."""
    rollout, name = settings.rollout, f"rollout-{index}"  # The same on every host.
    overlong = functools.partial(
        overlong_penalty,
        max_tokens=rollout.max_new_tokens,
        buffer_tokens=rollout.overlong_buffer_tokens,
    )
    server = settings.server
    fleet = Fleet(
        suspect_secs=settings.weights.poll_secs,
        clock=time.monotonic,
        speeds=dict(zip(server.addresses, server.speeds, strict=False)),
    )
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(client)
        await stack.enter_async_context(queue)
        # In a thread: a queue in this loop answers meanwhile.
        read = asyncio.to_thread(_read, settings, workdir)
        on = f"{READS_TASK} {settings.task.name!r}, which is imported and read"
        task, tokenizer, prompts, runner = await _awaited(queue, name, on, read)
        pool = stack.enter_async_context(parts.rewards_of(settings, task.reward))
        rewards = await _awaited(queue, name, f"{READS_REWARD} {task.reward!r}, which start", pool)
        client.run_id, client.vocab_size = queue.run_id, runner.vocab_size
        client.record = runner.record
        gc_freeze("prompts")
        clock = ActiveClock()
        teachers = parts.teachers_of(settings, clock)
        if teachers is not None:
            await stack.enter_async_context(teachers.client)
        sampler = Sampler(
            client=client,
            fleet=fleet,
            controls=server.controls,
            sampling={
                "max_new_tokens": rollout.max_new_tokens,
                "temperature": rollout.temperature,
                "stop_token_ids": list(tokenizer.stop_token_ids),
            }
            | runner.bias
            | runner.truncation
            | ({"max_kept": rollout.max_kept} if runner.truncation else {}),
            run_seed=settings.seed,
            request_timeout_secs=rollout.request_timeout_secs,
            max_retries=rollout.max_retries,
            outage_secs=settings.queue.outage_secs,
            clock=clock,
        )
        worker = Worker(
            name=name,
            queue=queue,
            sampler=sampler,
            fleet=fleet,
            rewards=rewards,
            prompts=prompts,
            runner=runner,
            group_size=rollout.group_size,
            max_running_groups=rollout.max_running_groups,
            drop_equal_rewards=rollout.drop_equal_rewards,
            max_pass_rate=rollout.max_pass_rate,
            teachers=teachers,
            overlong=overlong,
            frictions=parts.frictions_of(settings, tokenizer),
            run_seed=settings.seed,
            clock=clock,
        )
        await worker.run()


def _read(settings: Settings, workdir: pathlib.Path) -> tuple[Task, Tokenizer, Any, Runner]:
    """The task, its tokens, its training prompts and the rollout function."""
    tokenizer = parts.tokenizer_of(settings, workdir)
    task = parts.same_task_of(settings, workdir)
    bound = settings.rollout.max_prompt_tokens
    of_train = {"split": "train", "seed": settings.task.seed, "max_prompt_tokens": bound}
    prompts = prompt_stream(task, tokenizer, **of_train)
    return task, tokenizer, prompts, parts.runner_of(settings, tokenizer, task)


async def _awaited(queue: QueueClient, name: str, on: str, started: Awaitable[_T]) -> _T:
    """The result of a reading at a worker's start; the queue gets reports of the wait `on` it.

    A user's module may take minutes to import, in this process and in those of its reward.
    """
    waiting, since = asyncio.ensure_future(started), time.monotonic()
    try:
        while not (await asyncio.wait({waiting}, timeout=STATUS_SECS))[0]:
            await queue.report(name, [Wait(name, on, time.monotonic() - since)])
        return waiting.result()
    finally:
        if not waiting.done():  # A pool that starts ends its processes.
            waiting.cancel()
            await asyncio.wait({waiting})
