"""The questions of a preflight that kinds have in common, within one deadline."""

import json
import logging
import pathlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxrl_async.servers.port import Expected, ServerError, UnfitServerError

if TYPE_CHECKING:
    from jaxrl_async.servers.kinds.base import HttpKind

log = logging.getLogger(__name__)


class Checks:
    """The checks of one server; those that it fails raise UnfitServerError."""

    def __init__(self, server: "HttpKind", expected: Expected, deadline: float):
        """`deadline`: on the monotonic clock."""
        self._server, self._address = server, server.address
        self.expected, self._deadline = expected, deadline

    def left(self) -> dict[str, float]:
        """The bound of the next call, as its argument."""
        return {"timeout_secs": max(self._deadline - time.monotonic(), 1e-3)}

    def unfit(self, route: str, reason: str) -> UnfitServerError:
        """The error of a server that fails a check."""
        return UnfitServerError(self._address, route, reason)

    def other_model(self, route: str, found: str, wanted: Any) -> UnfitServerError:
        """The error of a server with another model."""
        return self.unfit(
            route,
            f"it has another model: {found}, the run's has {wanted}. Start it with the model of this run: its "
            "model.path, or the directory that `python -m jaxrl_async init --out=DIR` writes",
        )

    async def admin_key(self, continue_: Callable[..., Awaitable[None]]) -> None:
        """Asks for the end of a pause, which also ends the one that a killed learner left behind."""
        try:
            await continue_(**self.left())
        except ServerError as error:
            if error.status in (401, 403):
                raise wrong_key(
                    error, self.expected, "server.admin_api_key_env", "--admin-api-key"
                ) from error
            if error.status in (404, 405):
                reason = "it has no control routes: SGLang 0.5.23 is tested"
                raise self.unfit(error.route, reason) from error
            raise

    async def routes(self, ways: Mapping[str, Iterable[str]]) -> None:
        """Asks for the routes of weights.transport."""
        transport = self.expected.transport
        if transport not in ways:
            raise self.unfit(
                self._server.INFO,
                f"it takes no weights by weights.transport {transport!r}: set it to {' or '.join(map(repr, ways))}",
            )
        for route in ways[transport]:
            if not await self._server.has_route(route, **self.left()):
                raise self.unfit(
                    route,
                    f"it has no such route, which weights.transport {transport!r} needs: SGLang 0.5.23 is tested; "
                    "in front of SGLang-JAX, start jaxrl_async/extras/sglang_jax/server.py",
                )

    def base_files(self, route: str, server: str) -> None:
        """Refuses a server that takes adapters alone, of a run whose base has no files."""
        if self.expected.adapters and not self.expected.adapters.has_base_files:
            raise self.unfit(
                route,
                f"the base of the adapters is made by the run itself, and {server} takes adapters alone: set "
                "model.path, without a warm start, or use embedded servers",
            )

    def model(self, told: Mapping[str, Any] | None = None) -> None:
        """Compares the model that the server reports, or is `told` of, and the config.json that it names."""
        info, route = told or self._server.info, self._server.INFO
        wanted, found = self.expected.config.get("architectures"), info.get("architectures")
        if found and wanted and not set(found) & set(wanted):
            raise self.other_model(route, f"architecture {found[0]}", wanted[0])
        for said in (info, read_json(info.get("model_path"))):
            for key in _SHAPE:
                wants, has = self.expected.config.get(key), said.get(key)
                if None not in (has, wants) and has != wants:
                    raise self.other_model(route, f"{key} {has}", wants)

    async def vocabulary(self, ask: Callable[..., Awaitable[int | None]]) -> None:
        """Compares the size of the vocabulary, where it is told."""
        found, wanted = await ask(**self.left()), self.expected.config["vocab_size"]
        if found is not None and found != wanted:
            raise self.other_model("/generate", f"a vocabulary of {found} tokens", wanted)

    def layers(self, route: str, count: int) -> None:
        """Compares the number of layers; 0: it is not known."""
        wanted = self.expected.config["num_hidden_layers"]
        if count and count != wanted:
            raise self.other_model(route, f"{count} layers", wanted)

    def context(self, limits: Mapping[str, Any]) -> None:
        """Compares the bounds on the tokens of a request, by the flags that set them."""
        wanted = self.expected.max_total_tokens
        for flag, limit in limits.items():
            if isinstance(limit, int) and limit < wanted:
                raise self.unfit(
                    "/server_info",
                    f"it takes requests of {limit} tokens ({flag}), and server.max_total_tokens is {wanted}: start "
                    f"it with more, or set server.max_total_tokens to {limit} or less",
                )

    def kept_ids(self, found: int) -> None:
        """Compares the bound on the kept ids that it returns, 0 for none, with the run's."""
        if found < (wanted := self.expected.max_kept):
            raise self.unfit(
                self._server.INFO,
                f"it returns {f'{found} at most' if found else 'none'} of the ids that a token was drawn from, and "
                f"rollout.top_p, top_k and min_p need rollout.max_kept = {wanted}: use embedded servers of this "
                "config, or set rollout.top_p to 1, rollout.top_k and min_p to 0",
            )

    def experts(self, are_returned: bool, flag: str) -> None:
        """Says whether it returns the experts of a token, where the model has any; refuses it where they are needed."""
        if not (wanted := self.expected.replay_routes):
            return
        if are_returned:
            log.info("%s: returns routes (learner.replay_routes = %r)", self._address, wanted)
            return
        reason = f"it returns no routes, the experts of each token: start it with {flag}"
        if wanted == "on":
            route = self._server.INFO
            raise self.unfit(route, f"{reason}, or set learner.replay_routes to 'auto'")
        log.warning("%s: %s; the learner's router decides", self._address, reason)

    async def answer(self, ask: Callable[..., Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """The answer to a request for one token."""
        try:
            return await ask(**self.left())
        except ServerError as error:
            if error.status in (401, 403):
                raise wrong_key(error, self.expected, "server.api_key_env", "--api-key") from error
            if error.retryable:
                raise
            raise self.unfit(error.route, error.reason) from error


def wrong_key(error: ServerError, expected: Expected, setting: str, flag: str) -> UnfitServerError:
    """The error of a call that was refused for its key, which this setting names."""
    named = getattr(expected, setting.removeprefix("server."))
    if named:
        advice = f"the key in {named} ({setting}) is not its {flag}"
    else:
        advice = f"it has a key ({flag}): set {setting} to the environment variable with it"
    return UnfitServerError(error.address, error.route, f"{error.reason}: {advice}")


def read_json(directory: Any) -> Mapping[str, Any]:
    """The config.json in a directory; {} where this machine cannot read it."""
    try:
        found = json.loads((pathlib.Path(directory) / "config.json").read_text("utf-8"))
    except (OSError, TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# Of config.json: the sizes of the tensors.
_SHAPE = (
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "tie_word_embeddings",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
