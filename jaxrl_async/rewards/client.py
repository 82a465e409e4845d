"""The client of reward services, in the place of a pool of one's own: the same call, results and errors.

A call goes to the service with the fewest calls of this client for each of its processes. One that gives no answer
before its deadline is asked of another; that service is asked last until it answers. A reward's own error is an
answer, and final.
"""

import asyncio
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import grpc

from jaxrl_async import rpc
from jaxrl_async.rewards import rewards_pb2 as pb
from jaxrl_async.rewards.pool import Judgement, PoolError, RewardError, RewardTimeoutError

START_SECS = 30.0  # for the first service that answers
DESCRIBE_SECS = 5.0
WAIT_SECS = 30.0  # for a free process of a service
SUSPECT_SECS = 5.0  # for which a service that did not answer is asked last
RETRY_SECS = 0.2  # backoff where no service answers
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Service:
    address: str
    channel: grpc.aio.Channel
    stub: rpc.Stub
    num_processes: int = 0  # 0 until it has said so
    running: int = 0  # calls of this client
    suspect_until: float = -math.inf  # clock, seconds
    failure: str = ""  # why it gave no answer

    def load(self, now: float) -> tuple[bool, float]:
        return now < self.suspect_until, (self.running + 1) / max(self.num_processes, 1)

    def silence(self) -> str:
        return f"the reward service {self.address} gives no answer: {self.failure}"


@dataclasses.dataclass(eq=False, repr=False)
class RewardClient:
    """A RewardPool that runs elsewhere; use as `async with RewardClient(…) as rewards`.

    Raises:
      ValueError: tls_ca holds no certificate.
    """

    addresses: Sequence[str]  # "host:port" of each service
    reward: str  # its name; a service of another reward is refused
    _: dataclasses.KW_ONLY
    timeout_secs: float  # the bound on a call in the services' pools
    outage_secs: float  # bound on the time from a call's first failed attempt to its last
    # Added to twice timeout_secs, the deadline of an attempt: a pool may make a call once more.
    wait_secs: float = WAIT_SECS
    token: str | None = None  # bearer token of the services; None where they have none
    tls_ca: str = ""  # PEM file of the trusted authorities; "" for services without TLS
    clock: Callable[[], float] = time.monotonic  # seconds, monotonic

    def __post_init__(self):
        self._metadata = rpc.metadata(self.token)
        self._credentials = rpc.channel_credentials(self.tls_ca)
        self._services: list[_Service] = []

    async def __aenter__(self) -> "RewardClient":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Connects, within START_SECS, and logs which services do not answer yet.

        Raises:
          RewardError: no service answers, or one refuses the token or has another reward.
        """
        self._open()
        try:
            await self._connect()
        except BaseException:
            await self.close()
            raise

    async def look(self) -> tuple[list[str], list[str]]:
        """Asks every service once, within DESCRIBE_SECS, where the client is not started.

        Returns:
          A line for each that gives no answer, and a line for each that refuses the token or has another reward.
        """
        silent, unfit = [], []

        async def ask(service: _Service) -> None:
            try:
                if not await self._answers(service):
                    silent.append(service.silence())
            except PoolError as error:
                unfit.append(str(error))

        self._open()
        try:
            await asyncio.gather(*map(ask, self._services))
        finally:
            await self.close()
        return silent, unfit

    async def close(self) -> None:
        """Closes the connections; calls that wait fail with PoolError."""
        services, self._services = self._services, []
        await asyncio.gather(*(service.channel.close() for service in services))

    async def judge(
        self, completion: str, answer: str, seen: Mapping[str, Any] = MappingProxyType({})
    ) -> Judgement:
        """As `RewardPool.judge`.

        Raises:
          RewardTimeoutError, RewardError: the reward's own, in the words of the pool; or no service answered.
        """
        request = pb.JudgeRequest(
            reward=self.reward, completion=completion, answer=answer, seen=json.dumps(dict(seen))
        )
        reply = await self._ask(request)
        if reply.WhichOneof("outcome") == "reward":
            return Judgement(reply.reward, dict(reply.components))
        failure = reply.failure
        kind = RewardTimeoutError if failure.timeout else RewardError
        raise kind(failure.message, place=failure.place, traceback=failure.traceback)

    def waits_for(self) -> str:
        """The wait of a call, in words, and the services that gave no answer when they were asked last."""
        silent = ", ".join(s.address for s in self._services if not s.num_processes)
        return "its reward, of a service" + (f" (no answer: {silent})" if silent else "")

    async def _ask(self, request: pb.JudgeRequest) -> pb.JudgeReply:
        failed_since = None
        while self._services:
            service = min(self._services, key=lambda s: s.load(self.clock()))
            service.running += 1
            try:
                if not service.num_processes:  # It started, or started again, after this client.
                    await self._describe(service)
                deadline_secs = 2 * self.timeout_secs + self.wait_secs
                reply = await service.stub.Judge(
                    request, timeout=deadline_secs, metadata=self._metadata
                )
                service.suspect_until = -math.inf
                return reply
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._services or (task and task.cancelling()):
                    raise
                continue  # Of the channel, by `close`.
            except grpc.aio.AioRpcError as error:
                self._suspect(service, error)
                now = self.clock()
                failed_since = now if failed_since is None else failed_since
                log.warning("%s", service.silence())
                if now - failed_since > self.outage_secs:
                    raise PoolError(
                        f"no reward service answered for {self.outage_secs:g} s, the last one {service.address}: "
                        f"{error.details()}"
                    ) from None
            finally:
                service.running -= 1
            if all(self.clock() < other.suspect_until for other in self._services):
                await asyncio.sleep(RETRY_SECS)
        raise PoolError(f"the client of reward {self.reward!r} is closed")

    def _open(self) -> None:
        for address in self.addresses:
            channel = rpc.channel(grpc.aio, address, self._credentials)
            stub = rpc.Stub(channel, pb.DESCRIPTOR.services_by_name["Rewards"])
            self._services.append(_Service(address, channel, stub))

    async def _connect(self) -> None:
        deadline = self.clock() + START_SECS
        while True:
            found = await asyncio.gather(*map(self._answers, self._services))
            if any(found):
                break
            if self.clock() + RETRY_SECS > deadline:
                raise PoolError(
                    f"no reward service answers at {', '.join(self.addresses)} within {START_SECS:g} s: start them "
                    "by `python -m jaxrl_async rewards`"
                )
            await asyncio.sleep(RETRY_SECS)
        for service in self._services:
            if not service.num_processes:
                log.warning("%s", service.silence())

    async def _answers(self, service: _Service) -> bool:
        try:
            await self._describe(service)
        except grpc.aio.AioRpcError as error:
            self._suspect(service, error)
        return service.num_processes > 0

    async def _describe(self, service: _Service) -> None:
        reply = await service.stub.Describe(
            pb.DescribeRequest(), timeout=DESCRIBE_SECS, metadata=self._metadata
        )
        if reply.reward != self.reward:
            raise PoolError(
                f"the reward service {service.address} judges by {reply.reward!r}, and this run by {self.reward!r}"
            )
        service.num_processes = max(reply.num_processes, 1)
        service.suspect_until = -math.inf

    def _suspect(self, service: _Service, error: grpc.aio.AioRpcError) -> None:
        """Has a service that gave no answer asked last, and described again; raises PoolError where it refused."""
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise PoolError(
                f"the reward service {service.address} asks for a token; this process sent none or a wrong one: "
                "queue.token_env must name the variable that holds it"
            ) from None
        if error.code() not in _LOST:
            reason = error.details()
            raise PoolError(
                f"the reward service {service.address} refused a call: {reason}"
            ) from None
        service.suspect_until = self.clock() + SUSPECT_SECS
        service.num_processes, service.failure = 0, error.details() or ""
