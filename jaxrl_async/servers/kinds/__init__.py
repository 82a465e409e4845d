"""The kinds of inference servers: a file and a row of TABLE for each.

A server is recognised by its answer to the GET of an information route, here and nowhere else. Engines in this process
(`inference.direct`) are a kind too, which nobody has to recognise.
"""

import time
from typing import TYPE_CHECKING, Any

from jaxrl_async import names
from jaxrl_async.servers.answers import shown
from jaxrl_async.servers.port import ServerError, UnfitServerError

if TYPE_CHECKING:
    from jaxrl_async.servers.client import InferenceClient
    from jaxrl_async.servers.kinds.base import HttpKind

# Information route, "module:attribute" of the class. The first row of the route that recognises the answer counts.
_ROOM = "jaxrl_async.servers.kinds"
TABLE: dict[str, tuple[str, str]] = {
    # SGLang-JAX, as `extras` start it, is of this kind too.
    "embedded": ("/model_info", f"{_ROOM}.embedded:Embedded"),
    "relayed": ("/model_info", f"{_ROOM}.sglang:Relayed"),
    "sglang": ("/model_info", f"{_ROOM}.sglang:Sglang"),
    "relayed_vllm": ("/weight_info", f"{_ROOM}.vllm:RelayedVllm"),
    "vllm": ("/weight_info", f"{_ROOM}.vllm:Vllm"),
}


async def recognise(
    client: "InferenceClient", address: str, known: "HttpKind | None", timeout_secs: float
) -> tuple[type["HttpKind"], dict[str, Any]]:
    """The kind of a server, and what it says of itself; of a `known` one, the route is asked first.

    Raises:
      UnfitServerError: it answers as no kind does.
      ServerError: lost, late, or it has none of the routes.
    """
    deadline, missing, unknown = time.monotonic() + timeout_secs, None, None
    routes = list(dict.fromkeys(route for route, _ in TABLE.values()))
    if known is not None:
        routes.sort(key=lambda route: route != known.INFO)
    for place, route in enumerate(routes):
        # The first has all of it, to the digit that an error names.
        left = max(deadline - time.monotonic(), 1e-3) if place else timeout_secs
        try:
            info = await client.call("GET", address, route, None, left, is_short=True)
        except ServerError as error:
            # SGLang may answer 401 where it has no such route.
            is_other = bool(missing or unknown) and error.status in (401, 403)
            if error.status not in (404, 405) and not is_other:
                raise
            missing = missing or error
            continue
        for of_kind, name in TABLE.values():
            if of_kind == route and (kind := names.load(name)).recognises(info):
                return kind, info
        said = f"it is of no known kind, and answers {shown(info.get('message', info))}"
        unknown = UnfitServerError(address, route, said)
    refusal = unknown or missing
    assert refusal is not None
    raise refusal


async def remedy(client: "InferenceClient", address: str, *, timeout_secs: float) -> str:
    """The reason why a server is of no kind, with what to do."""
    deadline = time.monotonic() + timeout_secs
    for _, name in TABLE.values():
        left = max(deadline - time.monotonic(), 1e-3)
        reason = await names.load(name).remedy(client, address, timeout_secs=left)
        if reason is not None:
            return reason
    return "no such route: this is no inference server of a known kind (" + ", ".join(TABLE) + ")"


def presumed() -> type["HttpKind"]:
    """The class by which a server is asked that was not recognised: the routes of most kinds."""
    return names.load(f"{_ROOM}.sglang_api:SglangApi")
