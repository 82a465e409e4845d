"""The calls of a queue in this process, without a connection: the same answers and errors as of `calls`.

One event loop owns the queue. Rollout workers in that loop call it there; the learner's thread hands its calls over.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any

from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue.calls import CALL_TIMEOUT_SECS, WATCH_SECS, NotReadyError, QueueError
from jaxrl_async.queue.journal import JournalError
from jaxrl_async.queue.leases import OrderError
from jaxrl_async.queue.service import QueueService


class DirectCalls:
    """`Calls` in the queue's own loop."""

    def __init__(self, service: QueueService):
        self._service = service

    async def open(self) -> str:
        return self._service.run_id

    async def close(self) -> None:
        pass

    async def call(self, name: str, request: Any, wait_secs: float = 0.0) -> Any:
        return await _answer(self._service, name, request)

    def watch(self, request: pb.WatchRequest) -> AsyncGenerator[pb.FleetReply]:
        return self._service.WatchFleet(request)

    async def tell(self, report: pb.RoleReport, timeout_secs: float | None = None) -> None:
        await self._service.Report(report)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BlockingDirectCalls:
    """`BlockingCalls` of any thread but the queue's."""

    service: QueueService
    # Runs a coroutine in the queue's loop within some seconds, and returns its result. It raises what ended the loop,
    # where it has ended.
    run: Callable[[Coroutine, float], Any]
    # Bound on a call, in addition to the wait that it asks for.
    call_timeout_secs: float = CALL_TIMEOUT_SECS

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def call(self, name: str, request: Any, wait_secs: float = 0.0) -> Any:
        answer = _answer(self.service, name, request)
        return self.run(answer, self.call_timeout_secs + wait_secs)

    def watch(self, request: pb.WatchRequest) -> Iterator[pb.FleetReply]:
        replies = self.service.WatchFleet(request)

        async def next_reply() -> pb.FleetReply:
            return await anext(replies)

        while True:
            yield self.run(next_reply(), WATCH_SECS)

    def tell(self, report: pb.RoleReport) -> None:
        with contextlib.suppress(TimeoutError):  # The loop is busy: the report is lost.
            self.call("Report", report)


async def _answer(service: QueueService, name: str, request: Any) -> Any:
    """The answer of the queue, or all of a stream's; its refusals as `Calls` raises them."""
    try:
        reply = getattr(service, name)(request)
        if inspect.isasyncgen(reply):
            return [part async for part in reply]
        return await reply
    except TimeoutError as error:
        raise NotReadyError(f"{name}: {error}") from None
    except (JournalError, OrderError) as error:
        raise QueueError(f"{name}: {error}") from error
