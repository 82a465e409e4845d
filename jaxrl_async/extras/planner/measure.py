"""The rates of `simulate`, measured: of a running server by its own requests, of a learner from a run's metrics.

A server's two rates follow from one request alone, and from many at once: of n requests each gets
1 / (1/request_rate + n/server_rate) tokens a second (`simulate`). A push is the server's own weights, loaded
again under the name that they have. Every call has a deadline. A push empties the server's prefix cache;
nothing else of it changes.
"""

import asyncio
import math
import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.kinds.sglang_api import SglangApi
from jaxrl_async.servers.port import ServerError

REPEATS = 3  # of each measurement; the median counts
REQUESTS = 64  # at once, of a server that does not say how many it runs
WARM_STEPS = 2  # of a run, left out: programs compile
# A request among n that is slower than one alone by less than this share is as fast: the rest is noise.
RESOLUTION = 0.05


class MeasureError(RuntimeError):
    """A rate cannot be measured; the message names the server or the run, and why."""


async def of_server(
    server: str,
    *,
    num_requests: int,
    max_new_tokens: int,
    prompt_tokens: int,
    push: bool,
    timeout_secs: float,
    api_key: str | None,
    admin_api_key: str | None,
    tls_ca: str = "",
    say: Callable[[str], None] = print,
) -> dict[str, float]:
    """Measures a server that answers nobody else.

    Args:
      server: "http://host:port".
      num_requests: at once; 0 for the server's slots, or REQUESTS where it does not tell them.
      max_new_tokens: of a request; fewer where the server's bound is lower.
      prompt_tokens: of a request, likewise.
      push: also load the server's own weights again.
      timeout_secs: bound on each call.
      api_key, admin_api_key, tls_ca: as of `InferenceClient`.
      say: takes a line about what is measured now.

    Returns:
      request_rate and server_rate, tokens/s; with `push` pause_secs, of a server that names the files of its weights;
      num_slots where it tells it.

    Raises:
      MeasureError: no answer in time, a refusal, or a server that answers others.
    """
    keys = {"api_key": api_key, "admin_api_key": admin_api_key, "tls_ca": tls_ca}
    async with InferenceClient(**keys) as client:
        try:
            kind = await client.recognise(server, timeout_secs=timeout_secs)
            info = kind.info
            if busy := info.get("num_running_requests"):
                raise MeasureError(f"{server} answers {busy} requests of others")
            slots = await kind.num_slots(timeout_secs=timeout_secs)
            count = num_requests or slots or REQUESTS
            vocab_size = await kind.vocab_size(timeout_secs=timeout_secs)
            if most := info.get("max_total_tokens"):
                prompt_tokens = min(prompt_tokens, most // 2)
                max_new_tokens = min(max_new_tokens, most - prompt_tokens)
            rng = np.random.default_rng(0)

            async def wave(n: int) -> float:
                """Seconds a token of n requests that start together."""
                prompts = rng.integers(vocab_size or 2, size=(n, prompt_tokens)).tolist()
                since = time.monotonic()
                tokens = await _ask(client, server, prompts, max_new_tokens, timeout_secs)
                return (time.monotonic() - since) * n / tokens

            say(f"{server}: warm-up")
            await wave(count)
            await wave(1)
            say(f"{server}: {REPEATS} × 1 request of {max_new_tokens} tokens")
            alone = statistics.median([await wave(1) for _ in range(REPEATS)])
            say(f"{server}: {REPEATS} × {count} requests at once")
            among = statistics.median([await wave(count) for _ in range(REPEATS)])
            found = server_rates(alone, among, count) | ({"num_slots": slots} if slots else {})
            path, version = info.get("model_path"), info.get("weight_version")
            if push and (not path or version is None):  # As one that `serve` started.
                say(f"{server} names no files of its weights: no push of it is measured")
            elif push:
                say(f"{server}: {REPEATS} × its own weights, loaded again")
                weights = (path, version)
                times = [await _reload(kind, weights, timeout_secs) for _ in range(REPEATS)]
                found["pause_secs"] = statistics.median(times)
        except ServerError as error:
            raise MeasureError(str(error)) from error
    return found


def server_rates(alone_secs: float, among_secs: float, num_requests: int) -> dict[str, float]:
    """request_rate and server_rate from the seconds a token of a request alone, and of one among num_requests.

    alone = 1/r + 1/s and among = 1/r + n/s, so 1/s = (among − alone)/(n − 1).

    Raises:
      MeasureError: the times are not positive, or num_requests < 2.
    """
    if not (0 < alone_secs < math.inf and 0 < among_secs < math.inf and num_requests > 1):
        raise MeasureError(
            f"two rates need ≥ 2 requests at once and times > 0, got {num_requests} requests, "
            f"{alone_secs:g} and {among_secs:g} s a token"
        )
    more = max(among_secs - alone_secs, RESOLUTION * alone_secs)
    each = min(more / (num_requests - 1), alone_secs / 2)
    return {"request_rate": 1 / (alone_secs - each), "server_rate": 1 / each}


def of_run(rows: Sequence[Mapping[str, float]], completions: int) -> dict[str, float]:
    """A learner's rates from the rows of metrics.jsonl.

    Its seconds of work, without waits and checkpoints, are step_secs + token_secs · completion tokens, by least
    squares; neither is negative.

    Raises:
      MeasureError: fewer than three steps behind the WARM_STEPS.
    """
    rows = rows[WARM_STEPS:]
    if len(rows) < 3:
        raise MeasureError(
            f"a run needs ≥ {WARM_STEPS + 3} steps to be measured, got {len(rows) + WARM_STEPS}"
        )
    idle = ("time/wait_data_secs", "time/wait_push_secs", "time/checkpoint_secs")
    work = np.array([r["time/step_secs"] - sum(r.get(name) or 0.0 for name in idle) for r in rows])
    tokens = np.array([completions * r["tokens/completion_mean"] for r in rows])
    spread = tokens - tokens.mean()
    slope = float(spread @ work / (spread @ spread)) if spread.any() else math.inf
    token_secs = float(np.clip(slope, 0.0, max(work.mean(), 0.0) / tokens.mean()))
    step_secs = float(max(work.mean() - token_secs * tokens.mean(), 0.0))
    found = {"step_secs": step_secs, "token_secs": token_secs}
    pushes = [row["weights/push_secs"] for row in rows if row.get("weights/push_secs")]
    return found | ({"push_secs": statistics.median(pushes)} if pushes else {})


async def _ask(client, server: str, prompts, max_new_tokens: int, timeout_secs: float) -> int:
    """Sends all prompts at once. Returns the number of tokens that came back."""
    params = {"max_new_tokens": max_new_tokens, "temperature": 1.0, "ignore_eos": True}
    run = uuid.uuid4().hex

    async def one(i: int, prompt: list[int]) -> int:
        completion = await client.generate(
            server,
            rid=f"measure-{run}-{i:06d}",
            input_ids=prompt,
            sampling_params=params,
            timeout_secs=timeout_secs,
            any_weights=True,
        )
        return len(completion.tokens)

    tokens = sum(await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts))))
    if not tokens:
        raise MeasureError(f"{server} aborted every request: is it paused or stopping?")
    return tokens


async def _reload(server: SglangApi, weights: tuple[str, str], timeout_secs: float) -> float:
    """Seconds of a pause in which the server loads its own weights, (path, version), again."""
    since = time.monotonic()
    await server.pause(mode="retract", timeout_secs=timeout_secs, lease_secs=timeout_secs)
    try:
        await server.load(*weights, True, timeout_secs)
    finally:
        await server.continue_(timeout_secs=timeout_secs)
    return time.monotonic() - since
