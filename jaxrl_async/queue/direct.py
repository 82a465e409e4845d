"""The clients of a queue in this process: the same calls and errors as of `client`, without a connection.

One event loop owns the queue. Rollout workers in that loop call it there; the learner's thread hands its calls over.
"""

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue import wire
from jaxrl_async.queue.client import LearnerQueue, NotReadyError, QueueClient, QueueError
from jaxrl_async.queue.journal import JournalError
from jaxrl_async.queue.leases import OrderError
from jaxrl_async.queue.service import QueueService
from jaxrl_async.records import ServerRecord, Wait

PLACE = "in this process"  # the queue's address in messages


class DirectQueueClient(QueueClient):
    """The rollout side. Use in the queue's own loop."""

    def __init__(self, service: QueueService):
        super().__init__(PLACE, connect_timeout_secs=0.0, call_timeout_secs=0.0, outage_secs=0.0)
        self._service = service

    async def __aenter__(self) -> "DirectQueueClient":
        self.run_id = self._service.run_id
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def watch_fleet(self) -> AsyncIterator[tuple[ServerRecord, ...]]:
        """Yields the table of servers, at once and at every change."""
        last = None
        async for reply in self._service.WatchFleet(pb.WatchRequest()):
            servers = wire.decode_servers(reply.servers)
            v_pub = reply.v_pub if reply.HasField("v_pub") else None
            if (servers, v_pub) != (last, self.table_v_pub):
                last, self.table_v_pub = servers, v_pub
                yield servers

    async def report(
        self,
        role: str,
        waits: Sequence[Wait],
        secs: Mapping[str, float] | None = None,
        loads: Mapping[str, int] | None = None,
    ) -> None:
        """Reports as `QueueClient.report` does."""
        encoded = wire.encode_waits(waits)
        await self._service.Report(pb.RoleReport(role=role, waits=encoded, secs=secs, loads=loads))

    async def leave(self, worker: str) -> None:
        """Reports that a worker ends."""
        await self._service.Report(pb.RoleReport(role=worker, leaving=self._instance))

    async def _call(self, name: str, request: Any, wait_secs: float = 0.0) -> Any:
        return await _answer(self._service, name, request)


class DirectLearnerQueue(LearnerQueue):
    """The learner's side. Blocks; for any thread but the queue's."""

    def __init__(
        self,
        service: QueueService,
        run: Callable[[Coroutine, float], Any],
        *,
        call_timeout_secs: float,
    ):
        """Arguments:

        service: the queue.
        run: runs a coroutine in the queue's loop within some seconds, and returns its result. It raises what ended
          the loop, where it has ended.
        call_timeout_secs: bound on a call, in addition to the wait that it asks for.
        """
        super().__init__(
            PLACE,
            connect_timeout_secs=0.0,
            call_timeout_secs=call_timeout_secs,
            outage_secs=0.0,
        )
        self._service, self._run = service, run

    def __enter__(self) -> "DirectLearnerQueue":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def report(self, role: str, waits: Sequence[Wait]) -> None:
        """Reports the waits of a role."""
        self._call("Report", pb.RoleReport(role=role, waits=wire.encode_waits(waits)))

    def _call(
        self,
        name: str,
        request: Any,
        wait_secs: float = 0.0,
        read: Callable[[Any], Any] = lambda reply: reply,
    ) -> Any:
        answer = _answer(self._service, name, request)
        return read(self._run(answer, self._call_timeout_secs + wait_secs))


async def _answer(service: QueueService, name: str, request: Any) -> Any | Iterator[Any]:
    """The answer of the queue, or all of a stream's; its refusals as a client raises them."""
    try:
        reply = getattr(service, name)(request)
        if inspect.isasyncgen(reply):
            return iter([part async for part in reply])
        return await reply
    except TimeoutError as error:
        raise NotReadyError(f"{name}: {error}") from None
    except (JournalError, OrderError) as error:
        raise QueueError(f"{name}: {error}") from error
