"""The part of a kind that is the same for all that speak HTTP: calls, and the way of a version by its name."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from jaxrl_async.servers import answers
from jaxrl_async.servers.client import InferenceClient, encode
from jaxrl_async.servers.port import (
    Expected,
    ForeignVersionError,
    ForeignWeightsError,
    Push,
    ServerError,
)
from jaxrl_async.versions import protocol


class HttpKind:
    """One server: a `port.Kind`, without what its API gives meaning to."""

    INFO: ClassVar[str]  # the information route that the kind is recognised by
    # weights.transport → the control routes that it needs, each of which refuses an empty request. A method of that
    # name takes a push.
    WAYS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    # The same for adapters, where they differ.
    ADAPTER_WAYS: ClassVar[Mapping[str, tuple[str, ...]] | None] = None
    verifies_itself = False
    ends_pauses = False

    def __init__(self, client: InferenceClient, address: str):
        """Asks nothing yet."""
        self.client, self.address = client, address
        self.info: Mapping[str, Any] = {}

    @classmethod
    def recognises(cls, info: Mapping[str, Any]) -> bool:
        """Whether this is what a server of the kind answers."""
        return True

    @classmethod
    async def remedy(
        cls, client: InferenceClient, address: str, *, timeout_secs: float
    ) -> str | None:
        """What to do about a server of the kind that lacks its information route; None: it is none of the kind."""
        return None

    def difference(self, info: Mapping[str, Any], name: str, digest: str | None) -> str | None:
        """The difference between a report and the weights of that name and digest, in words; None: none."""
        held, found = info.get(protocol.WEIGHT_VERSION), info.get(protocol.WEIGHT_DIGEST, digest)
        if held != name:
            return f"version {held!r} instead of {name}"
        if found != digest:
            return f"weights with digest {found} as version {held}, its manifest says {digest}"
        return None

    async def hold(self, push: Push) -> None:
        """Gives the server a version, in the push's way; see `port.Kind`."""
        way, adapter_ways = push.options.way, self.ADAPTER_WAYS
        if push.stored.is_adapter and adapter_ways is not None and way not in adapter_ways:
            ways = " or ".join(map(repr, adapter_ways))
            raise push.error(f"takes no adapters by {way!r}: give them by {ways}")
        if way not in self.WAYS:
            raise push.error(f"has no route for {way!r}: give it weights by {self.ways()}")
        await getattr(self, way)(push)

    def ways_of(self, expected: Expected) -> Mapping[str, tuple[str, ...]]:
        """The ways in which it takes the versions of such a run."""
        return self.ADAPTER_WAYS if expected.adapters and self.ADAPTER_WAYS else self.WAYS

    def ways(self) -> str:
        """The ways in which it takes weights, in words."""
        return " or ".join(map(repr, self.WAYS))

    async def report(self, *, timeout_secs: float) -> dict[str, Any]:
        """What it says of its weights now."""
        return await self.get(self.INFO, timeout_secs, is_short=True)

    async def verify_name(self, push: Push) -> Mapping[str, Any]:
        """Its report, after a push; raises ServerError where it names other weights."""
        info = await self.report(timeout_secs=push.left())
        if (held := info.get(protocol.WEIGHT_VERSION)) != push.name:
            reason = f"reports version {held!r} after a push of version {push.name}"
            raise ServerError(self.address, self.INFO, reason, retryable=False)
        return info

    async def get(self, route: str, timeout_secs: float, **more: Any) -> dict[str, Any]:
        """The answer of an information route; `more` as of `InferenceClient.call`."""
        return await self.client.call("GET", self.address, route, None, timeout_secs, **more)

    async def post(
        self, route: str, payload: Mapping[str, Any], timeout_secs: float, **more: Any
    ) -> dict[str, Any]:
        """The answer of a control route that takes JSON; `more` as of `InferenceClient.call`."""
        call = ("POST", self.address, route, encode(payload).encode(), timeout_secs)
        more.setdefault("is_control", True)
        return await self.client.call(*call, **more)

    async def update(
        self, route: str, payload: Mapping[str, Any], timeout_secs: float, **more: Any
    ) -> None:
        """A call of `post` that changes weights; raises ServerError where it has no success."""
        answer = await self.post(route, payload, timeout_secs, **more)
        if answer.get("success") is not True:
            names = (payload.get(key) for key in ("weight_version", "new_version", "lora_name"))
            about = "".join(f"version {name} " for name in names if name is not None)
            reason = f"{about}refused: {answer.get('message') or answer.get('error_message')}"
            raise ServerError(self.address, route, reason, retryable=False)

    async def named_in_refusal(
        self, route: str, payload: Mapping[str, Any], pattern: re.Pattern[str], timeout_secs: float
    ) -> int | None:
        """The number in the reason for which a request is refused (HTTP 400); None where there is none."""
        try:
            await self.post(route, payload, timeout_secs, is_control=False)
        except ServerError as error:
            if error.status != 400:
                raise
            match = pattern.search(error.reason)
            return int(match[1]) if match else None
        return None

    def is_control(self, route: str) -> bool:
        """Whether a route takes the key of control routes."""
        return True

    async def has_route(self, route: str, *, timeout_secs: float) -> bool:
        """Whether a route exists that refuses an empty request, as one without the weights to load.

        SGLang answers 401 to the admin key at a route that it does not have.
        """
        try:
            await self.post(route, {}, timeout_secs, is_control=self.is_control(route))
        except ServerError as error:
            if error.status is None or error.status >= 500:
                raise
            return error.status not in (401, 403, 404, 405)
        return True

    @contextlib.contextmanager
    def reading(self, route: str, of: str = "answer", *, retryable: bool = False) -> Iterator[None]:
        """Reads an answer: raises NonsenseError where it breaks the API, ForeignVersionError for tokens of others."""
        try:
            yield
        except ForeignWeightsError as error:
            raise ForeignVersionError(self.address, route, str(error), retryable=True) from error
        except answers.MALFORMED as error:
            raise answers.malformed(self.address, route, error, of, retryable=retryable) from error
