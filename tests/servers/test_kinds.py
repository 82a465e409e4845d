"""A kind of server is one file and one row: here a server with an API of its own, the class that speaks it, and a run.

The kind is `Tiny`; the row, the publisher, the sampler and the preflight are those of every run.
"""

import asyncio
import contextlib
import functools
import os
import time

import numpy as np
import pytest
from aiohttp import web
from fixtures.tensors import tensors

from jaxrl_async.listener import listening
from jaxrl_async.preflight.server import check as preflight
from jaxrl_async.publishing.publisher import Publisher, PublisherError
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.records import Permit, ServerRecord
from jaxrl_async.rollout.sampler import Sampler
from jaxrl_async.servers import kinds
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.completions import checked_completion
from jaxrl_async.servers.fleet import Fleet
from jaxrl_async.servers.kinds.base import HttpKind
from jaxrl_async.servers.kinds.checks import Checks
from jaxrl_async.servers.port import Expected, ForeignVersionError, ForeignWeightsError, ServerError
from jaxrl_async.versions.store import WeightStore, read_manifest

DEADLINE_SECS = 20.0
EXPECTED = Expected({"vocab_size": 90, "num_hidden_layers": 2}, 64, "disk", "", "")


# The file of the kind.


class Tiny(HttpKind):
    INFO = "/status"
    WAYS = {"disk": ("/read",)}  # noqa: RUF012

    @classmethod
    def recognises(cls, info):
        return info.get("engine") == "tiny"

    def difference(self, info, name, digest):
        return None if info["holds"] == name else f"{info['holds']} instead of {name}"

    async def generate(self, request, *, timeout_secs):
        asked = {
            "id": request.rid,
            "prompt": request.input_ids,
            "n": request.sampling_params["max_new_tokens"],
        }
        answer = await self.post("/complete", asked, timeout_secs, is_control=False)
        try:
            return checked_completion(
                answer["ids"], answer["scores"], answer["by"], answer["end"], request
            )
        except ForeignWeightsError as error:
            raise ForeignVersionError(
                self.address, "/complete", str(error), retryable=True
            ) from error

    async def abort(self, rid, *, timeout_secs):
        await self.post("/stop", {"id": rid}, timeout_secs)

    async def pause(self, *, mode, timeout_secs, lease_secs=0.0):
        await self.post("/hold", {"keep": mode == "in_place"}, timeout_secs)

    async def continue_(self, *, timeout_secs):
        await self.post("/go", {}, timeout_secs)

    async def rename(self, name, *, timeout_secs):
        await self.post("/call", {"name": name}, timeout_secs)

    async def preflight(self, expected, *, deadline):
        checks = Checks(self, expected, deadline)
        await checks.admin_key(self.continue_)
        await checks.routes(self.WAYS)
        checks.model()

    async def disk(self, push):
        async with push.paused(self, functools.partial(self._verify, push)):
            await self.post("/read", {"path": os.fspath(push.stored)}, push.left())

    async def _verify(self, push):
        info = await self.report(timeout_secs=push.left())
        if info["sum"] != push.stored.digest:
            raise ServerError(self.address, self.INFO, f"holds {info['sum']}", retryable=False)
        await self.rename(push.name, timeout_secs=push.left())


# The fake.


class TinyServer:
    """Knows none of SGLang's routes."""

    def __init__(self):
        self.calls, self.layers, self.reads_wrong = [], 2, False
        self.restart()

    def restart(self):
        self.name, self.sum, self.is_held = "none", "", False

    def app(self):
        app = web.Application()
        app.add_routes([web.get("/status", self.status)])
        for name in ("complete", "stop", "hold", "go", "call", "read"):
            app.add_routes(
                [web.post(f"/{name}", functools.partial(self.take, getattr(self, name)))]
            )
        return app

    async def status(self, _):
        return web.json_response(
            {
                "engine": "tiny",
                "holds": self.name,
                "sum": self.sum,
                "num_hidden_layers": self.layers,
            }
        )

    async def take(self, method, request):
        body = await request.json()
        if method != self.complete:
            self.calls.append(method.__name__)
        try:
            return web.json_response(method(**body) or {})
        except (TypeError, OSError) as error:
            return web.json_response({"error": str(error)}, status=400)

    def complete(self, id, prompt, n):
        by = [{"version": self.name, "start": 0, "end": n}]
        return {"ids": [*range(n)], "scores": [-0.5] * n, "by": by, "end": "length"}

    def stop(self, id):
        pass

    def hold(self, keep):
        self.is_held = True

    def go(self):
        self.is_held = False

    def call(self, name):
        self.name = name

    def read(self, path):
        self.sum = "wrong" if self.reads_wrong else read_manifest(path)["digest"]


@pytest.fixture
async def server(monkeypatch):
    """A fake, in a run that has the row of its kind."""
    monkeypatch.setitem(kinds.TABLE, "tiny", ("/status", f"{__name__}:Tiny"))
    server = TinyServer()
    async with listening(server.app(), "127.0.0.1", 0, shutdown_secs=0.01) as port:
        server.address = f"http://127.0.0.1:{port}"
        yield server


@pytest.fixture
def store(tmp_path):
    return WeightStore(tmp_path, keep=9)


@contextlib.asynccontextmanager
async def publishing(server, store):
    """Yields the push of a version, the announced records and the publisher."""
    announced = []
    publisher = Publisher(
        {server.address: [server.address]},
        client=InferenceClient(),
        transport=Transport("disk", mode="retract"),
        pin=store.pin,
        announce=lambda version, records, *_: announced.append((version, records)),
        push_timeout_secs=DEADLINE_SECS,
        poll_secs=0.02,
        start_timeout_secs=DEADLINE_SECS,
        preflight=functools.partial(preflight, expected=EXPECTED),
    )

    async def push(version, wait=None):
        wait = wait or functools.partial(publisher.wait, timeout_secs=DEADLINE_SECS)
        path = store.write(version, tensors(version).items(), {})
        publisher.publish(version, lambda: store.get(version), timeout_secs=DEADLINE_SECS)
        await asyncio.to_thread(wait, version)
        return read_manifest(path)["digest"]

    try:
        yield push, announced, publisher
    finally:
        await asyncio.to_thread(publisher.close)


async def generate(server, *, client=None):
    """A completion of the sampler."""
    fleet = Fleet(suspect_secs=60.0, clock=lambda: 0.0, speeds={})
    fleet.update([ServerRecord(server.address, "HEALTHY", 1)])
    async with InferenceClient() as client:
        sampler = Sampler(
            client=client,
            fleet=fleet,
            controls={},
            sampling={"max_new_tokens": 3},
            run_seed=1,
            request_timeout_secs=DEADLINE_SECS,
            max_retries=0,
        )
        return await sampler.bind(Permit(7, 0), 0)([11, 12])


async def test_it_gets_versions_and_its_tokens_carry_them(server, store):
    async with publishing(server, store) as (push, announced, _):
        for version in (1, 2):
            assert await push(version) == server.sum
            completion = await generate(server)
            assert completion.versions.tolist() == [version] * 3
            np.testing.assert_array_equal(completion.logprobs, np.float32([-0.5] * 3))
    ((record,),) = [records for version, records in announced if version == 2]
    assert record == ServerRecord(server.address, "HEALTHY", 2)
    assert server.calls[-5:] == ["hold", "call", "read", "call", "go"]
    assert not server.is_held


async def test_wrong_weights_are_found_and_have_no_versions_name(server, store):
    server.reads_wrong = True
    async with publishing(server, store) as (push, announced, publisher):

        def wait(version):
            """Until the first attempt has failed; what a wait says that ends then."""
            deadline = time.monotonic() + DEADLINE_SECS
            while "holds wrong" not in publisher.waits_for() and time.monotonic() < deadline:
                time.sleep(0.01)
            publisher.wait(version, timeout_secs=0.0)

        with pytest.raises(PublisherError, match="holds wrong"):
            await push(1, wait)
    assert announced == [] and server.name == "1-unverified" and not server.is_held
    async with InferenceClient() as client:
        with pytest.raises(ForeignVersionError, match="1-unverified"):
            asked = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
            await client.generate(server.address, rid="0", **asked, timeout_secs=DEADLINE_SECS)


async def test_a_restart_is_found_and_mended(server, store):
    async with publishing(server, store) as (push, _, _):
        digest = await push(1)
        server.restart()
        async with asyncio.timeout(DEADLINE_SECS):
            while (server.name, server.sum) != ("1", digest):
                await asyncio.sleep(0.01)


async def test_one_that_is_unfit_is_refused(server, store):
    server.layers = 3
    async with publishing(server, store) as (push, _, _):
        with pytest.raises(PublisherError, match="num_hidden_layers 3, the run's has 2"):
            await push(1)
    assert server.name == "none"


async def test_its_aborts_are_its_own(server):
    async with InferenceClient() as client:
        await client.recognise(server.address, timeout_secs=DEADLINE_SECS)
        await client.abort(server.address, rid="a", timeout_secs=DEADLINE_SECS)
    assert server.calls == ["stop"]
