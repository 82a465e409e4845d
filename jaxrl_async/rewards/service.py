"""A pool of rewards as a gRPC service, for rollout workers on other machines.

What a reward did, its errors among it, is an answer. What befalls the pool itself is a status, and the caller asks
another service.
"""

import json
from collections.abc import Callable

import grpc
from google.protobuf import message as protobuf

from jaxrl_async import rpc, security
from jaxrl_async.rewards import rewards_pb2 as pb
from jaxrl_async.rewards.pool import PoolError, RewardError, RewardPool, RewardTimeoutError

MAX_MESSAGE_BYTES = 64 << 20
STOP_SECS = 0.5  # grace period of open calls when the service stops


async def serve(
    address: str,
    pool: RewardPool,
    *,
    on_bound: Callable[[str], None],
    token: str | None = None,
    tls_cert: str = "",
    tls_key: str = "",
    insecure: bool = False,
) -> None:
    """Serves a pool until cancelled, or until it is lost; starts and closes it.

    Args:
      address: "host:port"; port 0 for a free one.
      pool: not started.
      on_bound: called with "host:port", with the true port, once calls are answered.
      token: required of every call, as "authorization: Bearer TOKEN"; None for none, on loopback only.
      tls_cert: PEM file of the certificate, "" for no TLS.
      tls_key: PEM file of its key.
      insecure: allow an address beyond loopback without TLS.

    Raises:
      OSError: the address cannot be bound.
      ValueError: no token or no TLS on an address that is not loopback, or no certificate in the files.
      RewardError: the pool cannot start, or is lost.
    """
    security.check_listener("the reward service", address, token, "queue.token_env")
    security.check_tls(
        "the reward service",
        address,
        tls_cert,
        insecure,
        "queue.tls_cert and queue.tls_key",
        "security.insecure = True",
    )
    host = address.rpartition(":")[0]
    server = grpc.aio.server(
        options=rpc.server_options(MAX_MESSAGE_BYTES),
        interceptors=[rpc.TokenCheck("reward service", token)] if token else [],
    )
    server.add_generic_rpc_handlers((_handlers(pool), rpc.health()))
    async with pool:
        port = rpc.bind(server, "the reward service", address, tls_cert=tls_cert, tls_key=tls_key)
        await server.start()
        try:
            on_bound(f"{host}:{port}")
            await pool.lost()
        finally:
            await server.stop(STOP_SECS)


def _handlers(pool: RewardPool) -> grpc.GenericRpcHandler:
    """The methods, which take bytes: malformed ones are answered with a status."""

    async def judge(raw: bytes, context: grpc.aio.ServicerContext) -> pb.JudgeReply:
        try:
            request = pb.JudgeRequest.FromString(raw)
            seen = json.loads(request.seen or "{}")
            if not isinstance(seen, dict):
                raise ValueError(f"seen must be an object of JSON, got {request.seen!r:.80}")
        except (ValueError, protobuf.DecodeError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if request.reward != pool.reward:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this service judges by {pool.reward!r}, and the caller asks for {request.reward!r}",
            )
        try:
            judged = await pool.judge(request.completion, request.answer, seen)
        except PoolError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        except RewardError as error:
            failure = pb.Failure(
                message=security.escaped(str(error), keep="\n\t"),
                place=security.escaped(error.place),
                traceback=security.escaped(error.traceback, keep="\n\t"),
                timeout=isinstance(error, RewardTimeoutError),
            )
            return pb.JudgeReply(failure=failure)
        return pb.JudgeReply(reward=judged.reward, components=judged.components)

    async def describe(raw: bytes, context: grpc.aio.ServicerContext) -> pb.DescribeReply:
        return pb.DescribeReply(reward=pool.reward, num_processes=pool.num_processes)

    methods = {"Judge": judge, "Describe": describe}
    return rpc.handlers(pb.DESCRIPTOR.services_by_name["Rewards"], lambda m: methods[m.name])
