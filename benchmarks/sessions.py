"""The endpoint of agents: calls a second and added latency beside a bare proxy, and 1,000 sessions at once.

    python benchmarks/sessions.py [--rounds=7] [--smoke]

Sampling costs nothing here: a stub gives 64 tokens. The bare proxy is the same HTTP server: it reads the JSON of a
call, decodes the stub's tokens and answers the same JSON, without sessions, chat template, encoding or rows. A round is
the same conversations of 4 turns against both, in turn: at 64 at once for the calls a second, and one at a time for the
latency. The client is another process.

Then 1,000 agents at once, each with a session of 4 calls of which each waits for 0.2 to 1 s, through the rollout
function. A session is lost where it gives no row, and inexact where its row is not, token for token, what was given to
the stub and what that sampled. `least_secs` is the longest agent's wait alone.

Results are printed and written to benchmarks/results/sessions.json, or to --out.
"""

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import multiprocessing
import pathlib
import tempfile
import time
from collections.abc import Sequence

import aiohttp
import numpy as np
import record
from aiohttp import web

from jaxrl_async.listener import listening
from jaxrl_async.rollout.agent import AgentRollout
from jaxrl_async.rollout.context import Context, rng_of
from jaxrl_async.rollout.sessions import Sessions
from jaxrl_async.servers.descriptors import raise_open_file_limit
from jaxrl_async.servers.port import Completion
from jaxrl_async.tasks.tokenizer import load_tokenizer, train_bpe
from jaxrl_async.types import Prompt, Sample

ROOT = pathlib.Path(__file__).parent.parent
NUM_TURNS, NUM_TOKENS = 4, 64
TEMPLATE = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}<eos>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
QUESTION = "What is the sum of the numbers in the list, and which of them is the largest? " * 4
PROMPT = Prompt(0, np.ones(1, np.int32), QUESTION, "")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--smoke", action="store_true", help="few calls and sessions")
    args = parser.parse_args(argv)
    rounds, calls, alone, sessions = args.rounds, 1600, 100, 1000
    if args.smoke:
        rounds, calls, alone, sessions = 2, 16, 4, 20
    raise_open_file_limit()
    result = {"rounds": rounds}
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = make_tokenizer(pathlib.Path(directory))
        result["beside_a_proxy"] = asyncio.run(beside_a_proxy(tokenizer, rounds, calls, alone))
        result["at_once"] = asyncio.run(at_once(tokenizer, sessions))
    print(json.dumps(result, indent=2))
    record.write(args.out / "sessions.json", result, seeds=[0])


def make_tokenizer(directory: pathlib.Path):
    """Bytes and a few merges, with a chat template."""
    train_bpe([QUESTION], vocab_size=400, directory=directory / "bpe")
    (directory / "template.jinja").write_text(TEMPLATE)
    return load_tokenizer(directory / "bpe", chat_template=str(directory / "template.jinja"))


class Stub:
    """Samples random tokens, after a wait; notes the row that each call leaves."""

    def __init__(self, tokenizer, rng: np.random.Generator, wait_secs: Sequence[float] = ()):
        self._end, self._rng, self._wait_secs = tokenizer.eos_id, rng, list(wait_secs)
        self._texts = tokenizer.encode(QUESTION)
        self.row: list[int] = []
        self.mask: list[bool] = []

    async def __call__(self, tokens: Sequence[int], **sampling) -> Completion:
        if self._wait_secs:
            await asyncio.sleep(self._wait_secs.pop())
        ids = self._rng.choice(self._texts, NUM_TOKENS)
        ids[-1] = self._end
        assert list(tokens[: len(self.row)]) == self.row
        self.mask += [False] * (len(tokens) - len(self.row)) + [True] * NUM_TOKENS
        self.row = [*tokens, *ids.tolist()]
        logprobs, versions = np.full(NUM_TOKENS, -1, np.float32), np.zeros(NUM_TOKENS, np.int32)
        return Completion(ids.astype(np.int32), logprobs, versions, "stop")


def context_of(tokenizer, stub: Stub) -> Context:
    return Context(
        stub,
        encode=tokenizer.encode,
        decode=tokenizer.decode,
        vocab_size=tokenizer.vocab_size,
        max_new_tokens=1 << 20,
        max_row_tokens=1 << 20,
        make_rng=lambda: rng_of("rollout", 0, 0, 0, 0),
        encode_reply=tokenizer.encode_reply,
        encode_chat=tokenizer.encode_chat,
    )


async def beside_a_proxy(tokenizer, rounds: int, num_calls: int, num_alone: int) -> dict:
    """Calls a second, and seconds of a call, of the endpoint and the proxy: medians over paired rounds."""
    rng = np.random.default_rng(0)
    endpoint = Sessions(agent_rows="one", agent_calls=NUM_TURNS)
    await endpoint.start()
    proxy, address = await start_proxy(tokenizer, Stub(tokenizer, rng))
    rates, latencies = [], []
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        loop = asyncio.get_running_loop()

        async def ask(name: str, num_sessions: int, parallel: int) -> list[float]:
            """Seconds of all calls, then of each."""
            opened = [
                endpoint.session(PROMPT, context_of(tokenizer, Stub(tokenizer, rng)))
                for _ in range(num_sessions if name == "endpoint" else 0)
            ]
            urls = [one.__enter__()[0] for one in opened] or [address] * num_sessions
            try:
                return await loop.run_in_executor(pool, client, urls, parallel)
            finally:
                for one in opened:
                    one.__exit__(None, None, None)

        for turn in range(rounds + 1):  # The first one warms up.
            rate, latency = {}, {}
            for name in ("endpoint", "proxy") if turn % 2 else ("proxy", "endpoint"):
                all_secs, *_ = await ask(name, num_calls // NUM_TURNS, 64)
                rate[name] = num_calls / all_secs
                _, *secs = await ask(name, num_alone // NUM_TURNS, 1)
                latency[name] = float(np.median(secs))
            if turn:
                rates.append(rate)
                latencies.append(latency)
    await endpoint.close()
    await proxy.aclose()
    return {
        "calls_per_sec": medians(rates),
        "rate_ratio": record.quartiles([r["endpoint"] / r["proxy"] for r in rates]),
        "secs_of_a_call": medians(latencies),
        "added_secs": record.quartiles([s["endpoint"] - s["proxy"] for s in latencies]),
    }


async def start_proxy(tokenizer, stub: Stub) -> tuple[contextlib.AsyncExitStack, str]:
    async def answer(request: web.Request) -> web.Response:
        json.loads(await request.read())
        stub.row, stub.mask = [], []
        completion = await stub([])
        message = {"role": "assistant", "content": tokenizer.decode(completion.tokens.tolist())}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        return web.json_response({"object": "chat.completion", "choices": [choice]})

    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    stack = contextlib.AsyncExitStack()
    port = await stack.enter_async_context(listening(application, "127.0.0.1", 0))
    return stack, f"http://127.0.0.1:{port}/v1"


def client(urls: Sequence[str], parallel: int) -> list[float]:
    """Conversations with all of some URLs, in another process: seconds of all, then of each call."""
    return asyncio.run(_client(urls, parallel))


async def _client(urls: Sequence[str], parallel: int) -> list[float]:
    waiting, secs = list(urls), []
    async with aiohttp.ClientSession() as session:

        async def work() -> None:
            while waiting:
                await converse(session, waiting.pop(), secs)

        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(parallel)))
        return [time.perf_counter() - start, *secs]


async def converse(session: aiohttp.ClientSession, base_url: str, secs: list[float]) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(NUM_TURNS):
        start = time.perf_counter()
        body = {"model": "policy", "messages": messages}
        async with session.post(f"{base_url}/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            (choice,) = (await response.json())["choices"]
        secs.append(time.perf_counter() - start)
        messages = [*messages, choice["message"], {"role": "user", "content": "And then?"}]


async def agent(base_url: str, prompt: Prompt) -> float:
    """A conversation, on a connection of its own."""
    async with aiohttp.ClientSession() as session:
        await converse(session, base_url, [])
    return 1.0


async def at_once(tokenizer, num_sessions: int) -> dict:
    """Sessions that begin together, by the rollout function."""
    rng = np.random.default_rng(0)
    wait_secs = rng.uniform(0.2, 1.0, (num_sessions, NUM_TURNS))
    stubs = [Stub(tokenizer, np.random.default_rng(i), w) for i, w in enumerate(wait_secs)]
    function = AgentRollout(
        f"{__name__}:agent",
        agent_timeout_secs=60.0,
        agent_calls=NUM_TURNS,
        agent_rows="one",
    )
    start = time.perf_counter()
    found = await asyncio.gather(
        *(function(PROMPT, context_of(tokenizer, stub)) for stub in stubs), return_exceptions=True
    )
    secs = time.perf_counter() - start
    await function.close()
    rows = (of.trajectories[0] if isinstance(of, Sample) else None for of in found)
    kept = [(row, stub) for row, stub in zip(rows, stubs, strict=True) if row is not None]
    exact = [r.tokens.tolist() == s.row and r.mask.tolist() == s.mask for r, s in kept]
    return {
        "sessions": num_sessions,
        "calls": num_sessions * NUM_TURNS,
        "lost": num_sessions - len(kept),
        "inexact": len(exact) - sum(exact),
        "secs": secs,
        "least_secs": float(wait_secs.sum(axis=1).max()),
    }


def medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.median([row[name] for row in rows])) for name in rows[0]}


if __name__ == "__main__":
    main()
