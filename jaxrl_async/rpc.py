"""Shared by gRPC services and their clients: methods, options, TLS and the token. Independent of what they serve."""

import pathlib
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from jaxrl_async import security

HEALTH = "grpc.health.v1.Health"  # the service that Kubernetes' probes call
PING_SECS = 10.0  # interval of pings, and deadline of their answer: then a connection is given up
_NO_BOUND = (1 << 31) - 1


def client_options() -> list[tuple[str, int]]:
    """Options of a channel."""
    return [
        ("grpc.max_receive_message_length", -1),  # The service bounds the messages.
        ("grpc.max_send_message_length", -1),
        *_pings(),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),  # The default is two minutes.
        ("grpc.enable_http_proxy", 0),
    ]


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options of a service that refuses longer messages."""
    return [
        # Else two services could share a port, and each get some of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # Both bounds equal: between a soft and a hard one gRPC refuses at random.
        ("grpc.max_metadata_size", security.MAX_HEADER_BYTES),
        ("grpc.absolute_max_metadata_size", security.MAX_HEADER_BYTES),
        # gRPC's own bounds on what waits for this event loop, 1,000 calls and 30 s, end calls as CANCELLED.
        ("grpc.server.max_pending_requests", _NO_BOUND),
        ("grpc.server.max_pending_requests_hard_limit", _NO_BOUND),
        ("grpc.server_max_unrequested_time_in_server", _NO_BOUND),
        *_pings(),
        # Clients ping during a wait, too.
        ("grpc.http2.min_ping_interval_without_data_ms", int(500 * PING_SECS)),
    ]


def _pings() -> list[tuple[str, int]]:
    """Options of both sides: a peer that vanishes ends no connection."""
    return [
        ("grpc.keepalive_time_ms", int(1000 * PING_SECS)),
        ("grpc.keepalive_timeout_ms", int(1000 * PING_SECS)),
        ("grpc.http2.ping_timeout_ms", int(1000 * PING_SECS)),  # Without it a ping waits 60 s.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def bind(server: grpc.aio.Server, what: str, address: str, *, tls_cert: str, tls_key: str) -> int:
    """Binds a server to "host:port", with TLS where there is a certificate; returns the port.

    Raises:
      OSError: the address cannot be bound.
      ValueError: no certificate in the files.
    """
    try:
        # Its errors name the cause; those of gRPC do not.
        if security.server_context(tls_cert, tls_key) is None:
            return server.add_insecure_port(address)
        key, cert = (pathlib.Path(path).read_bytes() for path in (tls_key, tls_cert))
        return server.add_secure_port(address, grpc.ssl_server_credentials([(key, cert)]))
    except RuntimeError as error:
        raise OSError(f"{what} cannot listen on {address}: is the port taken?") from error


class TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without the token, of known and unknown methods, before their messages are received."""

    def __init__(self, what: str, token: str):
        """`what`: "queue", of errors."""
        self._token, self._probed = token, f"/{HEALTH}/Check"
        self._reason = f"this {what} asks for a token, and this call gave none or another one"

    async def intercept_service(
        self, continuation: Callable[..., Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        if handler_call_details.method == self._probed:
            return await continuation(handler_call_details)
        given = dict(handler_call_details.invocation_metadata).get("authorization", "")
        if security.is_bearer(str(given), self._token):
            return await continuation(handler_call_details)
        # A handler of a stream: gRPC receives no message before the handler reads one.
        return grpc.stream_unary_rpc_method_handler(self._refuse)

    async def _refuse(self, messages, context: grpc.aio.ServicerContext):
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, self._reason)


def health() -> grpc.GenericRpcHandler:
    """grpc.health.v1, without a token: SERVING for every service, while the event loop answers."""

    # A handler of a stream: an unknown caller's message is not received.
    async def check(messages: Any, context: grpc.aio.ServicerContext) -> bytes:
        return b"\x08\x01"  # HealthCheckResponse(status=SERVING)

    methods = {"Check": grpc.stream_unary_rpc_method_handler(check)}
    return grpc.method_handlers_generic_handler(HEALTH, methods)


def channel_credentials(tls_ca: str) -> grpc.ChannelCredentials | None:
    """TLS of a client that trusts the authorities in a PEM file; None for "".

    Raises:
      ValueError: no certificate in it.
    """
    if not tls_ca:
        return None
    security.client_context(tls_ca)  # Its errors name the cause; those of gRPC do not.
    return grpc.ssl_channel_credentials(pathlib.Path(tls_ca).read_bytes())


def channel(library: Any, address: str, credentials: grpc.ChannelCredentials | None) -> Any:
    """A channel to "host:port": of `grpc` for blocking calls, of `grpc.aio` for asynchronous ones."""
    if credentials is None:
        return library.insecure_channel(address, options=client_options())
    return library.secure_channel(address, credentials, options=client_options())


class Stub:
    """The methods of a service on a channel, by their names. They take and return messages."""

    def __init__(self, channel: Any, service: ServiceDescriptor):
        for method in service.methods:
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = make(
                f"/{service.full_name}/{method.name}",
                request_serializer=GetMessageClass(method.input_type).SerializeToString,
                response_deserializer=parser(method.output_type),
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:  # Of a name that is no method.
        raise AttributeError(f"the service has no method {name}")


def handlers(
    service: ServiceDescriptor, behavior_of: Callable[[MethodDescriptor], Callable]
) -> grpc.GenericRpcHandler:
    """The methods of a service. A behavior takes the bytes of a request, and returns or yields messages."""
    table = {}
    for method in service.methods:
        stream, reply = method.server_streaming, GetMessageClass(method.output_type)
        make = (
            grpc.unary_stream_rpc_method_handler if stream else grpc.unary_unary_rpc_method_handler
        )
        table[method.name] = make(behavior_of(method), response_serializer=reply.SerializeToString)
    return grpc.method_handlers_generic_handler(service.full_name, table)


def parser(message: Descriptor) -> Callable[[bytes], Any]:
    """Parses the bytes of a message; raises DecodeError."""
    return GetMessageClass(message).FromString


def metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Of a call with a token; None for none."""
    return (("authorization", f"Bearer {token}"),) if token else ()
