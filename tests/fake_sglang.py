"""A fake inference server, in a thread of its own: no weights, and behavior that a test sets.

It answers as this project's servers do, or with `sglang = True` as SGLang does, which reports checksums and no digest.

The token at absolute position p of a request with seed s is `token(s, p)`, whatever was asked before: so a resumed
request can be compared with one that was never interrupted.
"""

import asyncio
import contextlib
import pathlib
import socket
import threading

from aiohttp import web

from jaxrl_async.weights import store as weight_store
from jaxrl_async.weights import verification

VOCAB_SIZE = 100


def token(seed: int, position: int) -> int:
    """Never 0, so that 0 can be a stop token."""
    return 1 + (seed * 31 + position * 7) % (VOCAB_SIZE - 1)


def logprob(token_id: int) -> float:
    return -token_id / 1000


@contextlib.contextmanager
def started(count):
    """Fake servers that answer until the end of the block."""
    servers = [FakeServer().start() for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()


class FakeServer:
    """One fake server. Attributes may be changed by the test's thread at any time."""

    def __init__(self):
        self.port = _free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.reset()

    def reset(self):
        """What a restart does to a server: back to weights that no push gave."""
        self.version = "default"
        self.path = None  # of the weights
        self.digest = None  # of the weights
        self.sglang = False
        self.tp_size = 1
        self.device = "cpu"
        self.paused = False
        self.fail = {}  # route → (status, message)
        self.hang = set()  # routes that never answer
        self.slow = {}  # route → seconds before it answers
        self.drop = set()  # routes that break the connection
        self.answers = []  # whole answers of the next /generate calls
        self.policy = None  # token ids of a request → ids of its completion
        self.abort_after = []  # the next /generate calls end as aborted after so many tokens
        self.ignore_updates = False
        self.calls = []  # (route, JSON)
        self.keys = []  # the Authorization header of every call
        self.uploads = {}  # version/file → bytes

    def start(self) -> "FakeServer":
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(started)), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def stop(self):
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(10)

    def routes(self) -> list[str]:
        return [route for route, _ in self.calls]

    def payloads(self, route: str) -> list[dict]:
        return [payload for called, payload in self.calls if called == route]

    async def _run(self, started):
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/{route:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True).start()
        started.set()
        await self._stopped.wait()
        await runner.cleanup()

    async def _handle(self, request):
        self.keys.append(request.headers.get("Authorization"))
        if request.method == "PUT":
            self.uploads[request.path.removeprefix("/weights/")] = await request.read()
            self.calls.append((request.path, {}))
            return web.json_response({"message": "stored"})
        payload = await request.json() if request.can_read_body else {}
        self.calls.append((request.path, payload))
        if request.path in self.drop:
            request.transport.abort()
        if request.path in self.hang:
            await asyncio.sleep(3600)
        if request.path in self.slow:
            await asyncio.sleep(self.slow[request.path])
        if request.path in self.fail:
            status, message = self.fail[request.path]
            return web.json_response({"error": {"message": message}}, status=status)
        return await getattr(self, request.path.strip("/").replace("/", "_"))(payload)

    async def model_info(self, _):
        info = {"weight_version": self.version, "model_path": "somewhere"}
        return web.json_response(info if self.sglang else info | {"weight_digest": self.digest})

    async def server_info(self, _):
        return web.json_response(
            {"device": self.device, "tp_size": self.tp_size, "dtype": "float32"}
        )

    async def weights_checker(self, _):
        checksums = verification._expected_checksums(self.path, self.digest, "float32")
        return web.json_response({"success": True, "ranks": [{"checksums": checksums}]})

    async def update_weight_version(self, payload):
        self.version = payload["new_version"]
        return web.json_response({"success": True, "message": "renamed"})

    async def pause_generation(self, _):
        self.paused = True
        return web.json_response({"status": "ok"})

    async def continue_generation(self, _):
        self.paused = False
        return web.json_response({"status": "ok"})

    async def abort_request(self, _):
        return web.Response()

    async def flush_cache(self, _):
        return web.Response(text="Cache flushed.")

    async def update_weights_from_disk(self, payload):
        return self._load(payload, payload["model_path"])

    async def update_weights_from_upload(self, payload):
        return self._load(payload, None)

    def _load(self, payload, path):
        if not self.ignore_updates:
            self.version, self.path = payload["weight_version"], path
            if path is not None and (pathlib.Path(path) / weight_store.MANIFEST).exists():
                self.digest = weight_store.read_manifest(path)["digest"]
        return web.json_response({"success": True, "message": "loaded"})

    async def generate(self, payload):
        while self.paused:
            await asyncio.sleep(0.005)
        if self.answers:
            return web.json_response(self.answers.pop(0))
        sampling, prompt = payload["sampling_params"], payload["input_ids"]
        if self.policy is not None:
            ids = self.policy(prompt)
            versions = [(self.version, len(ids))]
            return web.json_response(answer(ids, versions=versions, reason="stop"))
        count, reason = sampling["max_new_tokens"], "length"
        if self.abort_after:
            count, reason = self.abort_after.pop(0), "abort"
        seed = sampling["sampling_seed"]
        ids = [token(seed, len(prompt) + i) for i in range(count)]
        return web.json_response(answer(ids, versions=[(self.version, count)], reason=reason))


def answer(ids, *, versions, reason="length") -> dict:
    """A /generate answer; versions are (version, number of tokens)."""
    spans, start = [], 0
    for version, count in versions:
        spans.append({"version": version, "start": start, "end": start + count})
        start += count
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": reason},
            "completion_tokens": len(ids),
            "weight_versions": spans,
            "output_token_logprobs": [[logprob(i), i, None] for i in ids],
        },
    }


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
